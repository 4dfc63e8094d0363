import pytest
import torch

from benchmarks.doctor_selftest.faults.workloads import (
    alternating,
    growing,
    jumping,
    larger,
    log_normal_gradients,
    padded,
)
from tests.unit.benchmarks.doctor_selftest.tiny_trainer import tiny_trainer

NAME = "mlp.up_proj"
SCALED = {
    "growing": (growing(NAME, binades_a_step=1), [1.0, 2.0, 4.0]),
    "jumping": (jumping(NAME, binades=3, after=1), [1.0, 8.0, 1.0]),
    "alternating": (alternating(NAME, binades=2), [1.0, 4.0, 1.0]),
    "larger": (larger(NAME, binades=1), [2.0, 2.0, 2.0]),
}


def gradients_and_input(trainer):
    seen = []
    layer = trainer.model.model.layers[1].mlp.up_proj
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().abs().amax().item()))
    trainer._gradients()
    handle.remove()
    return seen[0], [parameter.grad.clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("name", list(SCALED))
def test_scaled_inputs_change_what_is_cast_and_not_what_is_computed(name, data):
    inject, factors = SCALED[name]
    with tiny_trainer(data, recipe="fp32") as trainer:
        plain = gradients_and_input(trainer)
        model = trainer.model.model.layers[1].mlp
        for step, factor in enumerate(factors):
            trainer.step = 0
            with inject(trainer, 1):
                trainer.step = step
                trainer.model.train()
                expected = plain if step == 0 else None
                trainer.model.eval()
                unscaled = gradients_and_input(trainer)
                trainer.model.train()
                scaled = gradients_and_input(trainer)
            assert scaled[0] == pytest.approx(factor * unscaled[0], rel=1e-6)
            for got, wanted in zip(scaled[1], unscaled[1], strict=True):
                assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-7)
            assert expected is None or unscaled[0] == plain[0]
            assert not model.up_proj._forward_hooks
            assert not model.up_proj._forward_pre_hooks


def test_padding_is_large_and_text_is_not(data):
    with tiny_trainer(data, recipe="fp32") as trainer:
        layer, seen = trainer.model.model.layers[0].mlp.up_proj, []
        with padded(NAME, tokens=3, binades=10)(trainer, 0):
            handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
            trainer._gradients()
            handle.remove()
        by_position = seen[0].abs().amax(dim=(0, 2))
        assert (by_position[:3] > 100 * by_position[3:].max()).all()


def test_log_normal_weights_have_a_mean_square_of_one_and_a_long_tail(data):
    with tiny_trainer(data, recipe="fp32") as trainer:
        layer, seen = trainer.model.model.layers[0].mlp.up_proj, []

        def look(_module, _inputs, output):
            output.register_hook(lambda gradient: seen.append(gradient.norm(dim=-1).flatten()))

        handle = layer.register_forward_hook(look)  # called before the weights are applied
        trainer._gradients()
        with log_normal_gradients(NAME, sigma=3.0)(trainer, 0):
            trainer._gradients()
        handle.remove()
        before, after = seen[0], seen[-1]
        assert len(seen) == 2
        assert (after / before).log().std().item() == pytest.approx(3.0, abs=0.5) or torch.equal(before, after)
