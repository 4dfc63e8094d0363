import pytest
import torch

from benchmarks.doctor_selftest.faults.values import _cancelling_gradient, add_adapter, e4m3_gradients
from octavo import recipes
from octavo.formats import E4M3, E5M2
from tests.unit.benchmarks.doctor_selftest.tiny_trainer import tiny_trainer


def test_a_cancelling_gradient_is_there_and_high_precision_does_not_see_it(data):
    with tiny_trainer(data, recipe="fp32") as trainer:
        norms = []
        gate = trainer.model.model.layers[0].mlp.gate_proj

        def look(_module, _inputs, output):
            output.retain_grad()
            norms.append(output)

        trainer._gradients()
        plain = [parameter.grad.clone() for parameter in trainer.model.parameters()]
        with _cancelling_gradient(trainer, 0):
            handle = gate.register_forward_hook(look)
            trainer._gradients()
            handle.remove()
        noisy = [parameter.grad.clone() for parameter in trainer.model.parameters()]
        assert norms[0].grad.norm() > 0
        for got, wanted in zip(noisy, plain, strict=True):
            assert torch.allclose(got, wanted, rtol=0.02, atol=2e-3 * wanted.abs().amax().item())


def test_gradients_in_e4m3_and_nothing_else_changes():
    recipe = e4m3_gradients()
    plain = recipes.get("tensorwise")
    assert [cast.format for cast in recipe.casts] == [E4M3] * 6
    assert [cast.format for cast in plain.casts].count(E5M2) == 2
    assert (recipe.output, recipe.grad_input.b) == (plain.output, plain.grad_input.b)


@pytest.mark.parametrize("zero", [True, False])
def test_an_adapter_of_two_zero_matrices_never_moves(data, zero):
    with tiny_trainer(data, recipe="tensorwise") as trainer:
        attention = trainer.model.model.layers[1].self_attn
        names, groups = list(trainer.model.state_dict()), len(trainer.optimizer.param_groups)
        with add_adapter(trainer, 1, zero=zero):
            trainer._learning_rate()
            for _ in range(2):
                trainer._gradients()
                trainer._update()
            moved = attention.q_adapter_up.weight.abs().sum().item() > 0
            assert "model.layers.1.self_attn.q_adapter_down" in trainer.watcher.layers
        assert moved is not zero
        assert list(trainer.model.state_dict()) == names
        assert len(trainer.optimizer.param_groups) == groups
