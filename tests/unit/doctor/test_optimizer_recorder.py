"""An optimizer's step against Adam's formulas in NumPy's float64."""

import math

import numpy as np
import pytest
import torch

from octavo.doctor import optimizer_recorder
from octavo.doctor.optimizer_recorder import OptimizerRecorder
from octavo.doctor.series import PARAMETER_FIELDS
from octavo.errors import ConfigError


def model_of(*, dtype=torch.float32):
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).to(dtype)


def fill(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) + 0.3).to(p.dtype)


def recorded(recorder):
    found: dict[str, torch.Tensor] = {}
    with OptimizerRecorder.recording(recorder, found):
        recorder.optimizer.step()
    return {name: dict(zip(PARAMETER_FIELDS, values.tolist(), strict=True)) for name, values in found.items()}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}, {"amsgrad": True}], ids=str)
def test_three_steps_of_adam(kind, options):
    model = model_of()
    optimizer = kind(model.parameters(), lr=0.01, betas=(0.8, 0.95), **options)
    recorder = OptimizerRecorder(model, optimizer)
    means = squares = 0.0
    for step in range(1, 4):
        fill(model, step)
        gradient, before = (t.detach().double().numpy().copy() for t in (model[0].weight.grad, model[0].weight))
        found = recorded(recorder)
        assert found.keys() == {"0.weight", "2.weight"}, "vectors are no matrices"
        means, squares = 0.8 * means + 0.2 * gradient, 0.95 * squares + 0.05 * gradient**2
        variance = squares / (1 - 0.95**step) - (means / (1 - 0.8**step)) ** 2
        after = model[0].weight.detach().double().numpy()
        assert found["0.weight"] == {
            "grad_norm": pytest.approx(np.sqrt((gradient**2).sum()), rel=1e-6),
            "gradient_variance": pytest.approx(np.clip(variance, 0, None).sum(), rel=1e-4, abs=1e-6),
            "update_ratio": pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-5),
        }


def test_other_optimizers_have_no_variance():
    model = model_of()
    recorder = OptimizerRecorder(model, torch.optim.SGD(model.parameters(), lr=0.5))
    fill(model, 1)
    before, gradient = model[2].weight.detach().clone(), model[2].weight.grad.clone()
    found = recorded(recorder)["2.weight"]
    assert math.isnan(found["gradient_variance"])
    assert found["update_ratio"] == pytest.approx((0.5 * gradient.norm() / before.norm()).item(), rel=1e-5)


def test_rows_stand_for_a_large_matrix(monkeypatch):
    monkeypatch.setattr(optimizer_recorder, "SAMPLED_ELEMENTS", 1 << 10)
    model = torch.nn.Linear(64, 1000, bias=False)
    recorder = OptimizerRecorder(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for step in (1, 2):
        fill(model, step)
        before = model.weight.detach().clone()
        found = recorded(recorder)["weight"]
    gradients = [torch.randn(1000, 64, generator=torch.Generator().manual_seed(s)) + 0.3 for s in (1, 2)]
    assert found["grad_norm"] == pytest.approx(gradients[1].norm().item(), rel=1e-6), "of all of it"
    assert found["update_ratio"] == pytest.approx(((model.weight - before).norm() / before.norm()).item(), rel=0.05)
    means = (0.9 * gradients[0] + gradients[1]) / 1.9
    squares = (0.999 * gradients[0] ** 2 + gradients[1] ** 2) / 1.999
    assert found["gradient_variance"] == pytest.approx((squares - means**2).clamp(min=0).sum().item(), rel=0.1)


def test_parameters_of_any_kind():
    """BF16, three dimensions, without a gradient, frozen, a sparse gradient."""
    model = torch.nn.ModuleDict(
        {
            "narrow": torch.nn.Linear(300, 40, bias=False, dtype=torch.bfloat16),
            "conv": torch.nn.Conv1d(4, 6, 3, bias=False),
            "unused": torch.nn.Linear(4, 4, bias=False),
            "frozen": torch.nn.Linear(4, 4, bias=False),
            "rare": torch.nn.Embedding(50, 8, sparse=True),
        }
    )
    model["frozen"].weight.requires_grad_(False)
    recorder = OptimizerRecorder(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model["narrow"].weight.grad = torch.randn(40, 300).bfloat16()
    model["conv"].weight.grad = torch.randn(6, 4, 3)
    model["rare"](torch.tensor([3, 3, 7])).square().sum().backward()
    gradient = model["rare"].weight.grad
    assert isinstance(gradient, torch.Tensor)
    rare = gradient.to_dense()
    found = recorded(recorder)
    assert found.keys() == {"narrow.weight", "conv.weight", "unused.weight", "rare.weight"}
    norms = {name: values["grad_norm"] for name, values in found.items()}
    assert norms["narrow.weight"] == pytest.approx(model["narrow"].weight.grad.double().norm().item(), rel=1e-5)
    assert norms["conv.weight"] == pytest.approx(model["conv"].weight.grad.norm().item(), rel=1e-5)
    assert norms["rare.weight"] == pytest.approx(rare.norm().item(), rel=1e-5)
    assert math.isnan(norms["unused.weight"])
    assert found["unused.weight"]["update_ratio"] == 0


def test_hooks_go_when_the_step_is_over_even_by_an_exception():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    recorder = OptimizerRecorder(model, optimizer)
    found: dict[str, torch.Tensor] = {}
    with pytest.raises(RuntimeError, match="stop"), OptimizerRecorder.recording(recorder, found):
        raise RuntimeError("stop")
    fill(model, 1)
    optimizer.step()
    assert not found
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_without_an_optimizer_nothing_is_recorded():
    found: dict[str, torch.Tensor] = {}
    with OptimizerRecorder.recording(None, found):
        pass
    assert not found


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.Adam(model_of().parameters())
    with pytest.raises(ConfigError, match="trains no parameter of this model; watch it with the one that does"):
        OptimizerRecorder(model_of(), optimizer)
