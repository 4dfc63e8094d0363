"""The reference is the rule itself, in plain Python: double after so many clean steps, halve after a bad one."""

import math

import pytest
import torch
from torch import nn

from octavo.errors import CheckpointError, ConfigError
from octavo.training.loss_scaling import LossScaler

CLEAN, BAD = 1.0, math.inf


def _optimizer(**options):
    return torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.25, weight_decay=0.0, **options)


def _step(scaler, optimizer, slope):
    """One step of loss = slope · w₀ + w₁ + w₂; what step returned, and whether the weights moved."""
    (weight,) = optimizer.param_groups[0]["params"]
    before = weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale((weight * torch.tensor([slope, 1.0, 1.0])).sum()).backward()
    made = scaler.step(optimizer)
    scaler.update()
    return made, not torch.equal(before, weight)


def _expected(slopes, *, interval, floor=1.0, ceiling=math.inf, value=2.0**16):
    clean, values = 0, []
    for slope in slopes:
        clean = clean + 1 if math.isfinite(slope) else 0
        if not math.isfinite(slope):
            value /= 2
        elif clean == interval:
            value, clean = value * 2, 0
        value = min(max(value, floor), ceiling)
        values.append(value)
    return values


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("floor", "ceiling"), [(1.0, None), (2.0**15, 2.0**17)])
def test_dynamic_scale_grows_and_halves_as_documented(floor, ceiling, fused):
    slopes = [CLEAN] * 7 + [BAD] * 4 + [CLEAN, math.nan] + [CLEAN] * 5
    scaler, optimizer = LossScaler(growth_interval=3, floor=floor, ceiling=ceiling), _optimizer(fused=fused)
    values = []
    for slope in slopes:
        made, moved = _step(scaler, optimizer, slope)
        assert made == moved == math.isfinite(slope)
        values.append(scaler.value)
    assert values == _expected(slopes, interval=3, floor=floor, ceiling=ceiling or math.inf)


def test_a_dynamic_scale_has_the_published_defaults():
    scaler, optimizer = LossScaler(), _optimizer()
    assert scaler.value == 2.0**16
    for _ in range(40):
        _step(scaler, optimizer, BAD)
    assert scaler.value == 1.0
    scaler.load_state_dict({"scale": 4.0, "clean_steps": 1999})
    _step(scaler, optimizer, CLEAN)
    assert scaler.value == 8.0


def test_static_scale_stays_and_nonfinite_steps_are_skipped():
    scaler, optimizer = LossScaler(8.0), _optimizer()
    for slope in (CLEAN, BAD, CLEAN):
        assert _step(scaler, optimizer, slope) == (math.isfinite(slope),) * 2
        assert scaler.value == 8.0


def test_gradients_and_step_do_not_depend_on_the_scale():
    plain, scaled = _optimizer(), _optimizer()
    scaler = LossScaler()
    for optimizer in (plain, scaled):
        (weight,) = optimizer.param_groups[0]["params"]
        loss = (weight * torch.tensor([1e-3, 2.0, -7.0])).sum()
        (loss if optimizer is plain else scaler.scale(loss)).backward()
    assert scaler.unscale_(scaled)
    assert scaler.unscale_(scaled), "a second call divides nothing twice"
    (one,), (other,) = plain.param_groups[0]["params"], scaled.param_groups[0]["params"]
    assert torch.equal(one.grad, other.grad)
    plain.step()
    scaler.step(scaled)
    assert torch.equal(one, other)


def test_scaling_keeps_gradients_that_fp16_would_flush():
    """A gradient of 2^-26 is zero in FP16 and exact once scaled."""
    layer = nn.Linear(1, 1, bias=False)
    x = torch.full((1, 1), 2.0**-10)
    grads = {}
    for name, scaler in {"plain": LossScaler(1.0), "scaled": LossScaler()}.items():
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = layer(x).float().sum() * 2.0**-16
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD(layer.parameters(), lr=1.0))
        assert layer.weight.grad is not None
        grads[name] = layer.weight.grad.item()
    assert grads == {"plain": 0.0, "scaled": 2.0**-26}


def test_state_round_trip_continues_the_schedule():
    slopes = [CLEAN, CLEAN, BAD, CLEAN, CLEAN, CLEAN, CLEAN]
    whole, optimizer = LossScaler(growth_interval=3), _optimizer()
    for slope in slopes:
        _step(whole, optimizer, slope)
    first, second = LossScaler(growth_interval=3), LossScaler(growth_interval=3)
    for slope in slopes[:5]:
        _step(first, optimizer, slope)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() == {"scale": 2.0**15, "clean_steps": 2}
    for slope in slopes[5:]:
        _step(second, optimizer, slope)
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": "fast"},
        {"scale": 0.0},
        {"scale": True},
        {"scale": math.inf},
        {"floor": -1.0},
        {"ceiling": 8.0},
        {"initial": 0.5},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"growth_interval": "9"},
        {"initial": 1e300},
        {"floor": 1e-300},
    ],
)
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match=r"not |between"):
        LossScaler(**arguments)


def test_unavailable_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees none; use device='cpu'"):
        LossScaler(device="cuda")


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        [1.0, 2],
        {"scale": 2.0},
        {"scale": 0.5, "clean_steps": 0},
        {"scale": math.nan, "clean_steps": 0},
        {"scale": 1e300, "clean_steps": 0},
        {"scale": "x", "clean_steps": 0},
        {"scale": True, "clean_steps": 0},
        {"scale": 2.0, "clean_steps": math.nan},
        {"scale": 2.0, "clean_steps": 1.5},
        {"scale": 2.0, "clean_steps": "9"},
        {"scale": 2.0, "clean_steps": -1},
    ],
    ids=str,
)
def test_invalid_state_is_refused(state):
    scaler = LossScaler()
    with pytest.raises(CheckpointError, match="loss scale"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == {"scale": 2.0**16, "clean_steps": 0}


def test_updating_without_gradients_of_a_scaled_loss_is_refused():
    scaler, optimizer = LossScaler(), _optimizer()
    (weight,) = optimizer.param_groups[0]["params"]
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        with pytest.raises(ConfigError, match="call "):
            call()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ConfigError, match=r"call scale\(loss\).backward\(\) first"):
        scaler.step(optimizer)
    assert _step(scaler, optimizer, CLEAN) == (True, True)
    with pytest.raises(ConfigError, match="call one of them first"):
        scaler.update()


@pytest.mark.parametrize("slope", [BAD, math.nan])
def test_skipped_step_still_lowers_the_scale(slope):
    scaler, optimizer = LossScaler(), _optimizer()
    (weight,) = optimizer.param_groups[0]["params"]
    scaler.scale((weight * slope).sum()).backward()
    assert not scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.state_dict() == {"scale": 2.0**15, "clean_steps": 0}
    assert weight.tolist() == [1.0] * 3


def test_overflow_in_the_division_counts_as_nonfinite():
    """A scale below 1 multiplies: the gradient was finite and is not after it."""
    scaler, optimizer = LossScaler(initial=2.0**-8, floor=2.0**-12, growth_interval=1), _optimizer()
    assert _step(scaler, optimizer, 2.0**127) == (True, True)
    optimizer.zero_grad()
    scaler.load_state_dict({"scale": 2.0**-8, "clean_steps": 0})
    (weight,) = optimizer.param_groups[0]["params"]
    before = weight.detach().clone()
    scaler.scale(weight.sum()).backward()
    weight.grad.fill_(2.0**127)
    assert not scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, before)
    assert scaler.value == 2.0**-9


def test_scale_is_rounded_to_float32():
    scaler, optimizer = LossScaler(0.1), _optimizer()
    _step(scaler, optimizer, BAD)
    assert scaler.value == scaler.floor == scaler.ceiling == torch.tensor(0.1).item()
    LossScaler(0.1).load_state_dict(scaler.state_dict())


def test_a_state_of_a_longer_interval_grows_at_the_next_clean_step():
    scaler, optimizer = LossScaler(growth_interval=3), _optimizer()
    scaler.load_state_dict({"scale": 4.0, "clean_steps": 1500})
    _step(scaler, optimizer, CLEAN)
    assert scaler.state_dict() == {"scale": 8.0, "clean_steps": 0}


def test_fp16_parameters_are_refused():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ConfigError, match="keep the parameters in FP32"):
        LossScaler().unscale_(torch.optim.SGD([weight]))
