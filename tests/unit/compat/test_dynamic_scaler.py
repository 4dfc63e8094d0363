"""The oracle is the article's rule in Python floats, with the format's own maximum."""

import math
from typing import Any

import pytest
import torch

from octavo.compat import DynamicScaler
from octavo.errors import ConfigError
from octavo.formats import E5M2
from octavo.numerics.reference import decode, encode


def _scale_of(amax):
    """maximum / amax, divided in float64 and rounded once."""
    return torch.tensor(E5M2.max / amax, dtype=torch.float64).float().item()


def _mean(scales):
    return torch.tensor(sum(scales) / len(scales)).item()


def _tensor(amax):
    return torch.tensor([amax, -amax / 3, 0.0])


def test_codes_are_those_of_the_product_and_the_scale_encodes():
    x = torch.randn(200) * torch.logspace(-6, 0, 200)
    codes, scale = DynamicScaler().scale_tensor(x)
    assert codes.dtype is torch.float8_e5m2
    assert scale == _scale_of(x.abs().max().item())
    expected = [decode(encode((value * scale).item(), E5M2), E5M2) for value in x]
    assert codes.float().tolist() == expected
    assert codes.float().abs().max() == E5M2.max


def test_every_fourth_tensor_enters_a_window_of_scales():
    scaler, amaxes = DynamicScaler(history_size=3, update_freq=4), [2.0 ** (i % 7) * (1 + i / 64) for i in range(24)]
    for step, amax in enumerate(amaxes):
        _, scale = scaler.scale_tensor(_tensor(amax))
        seen = amaxes[: step + 1 : 4][-3:]
        assert scale == _mean([_scale_of(one) for one in seen])


def test_a_call_may_say_how_often_as_the_articles_does():
    """update_freq is an argument of the article's scale_tensor, and not of its constructor."""
    scaler, amaxes = DynamicScaler(2), [2.0 ** (i % 5) for i in range(12)]
    for step, amax in enumerate(amaxes):
        _, scale = scaler.scale_tensor(_tensor(amax), update_freq=3)
        assert scale == _mean([_scale_of(one) for one in amaxes[: step + 1 : 3][-2:]])
    wrong: Any
    for wrong in (0, 1.5, "4"):
        with pytest.raises(ConfigError, match="update_freq must be a whole number"):
            scaler.scale_tensor(_tensor(1.0), update_freq=wrong)


def test_first_scale_comes_from_the_first_tensor_alone():
    _, scale = DynamicScaler().scale_tensor(_tensor(0.5))
    assert scale == 2 * E5M2.max


def test_an_overflow_backs_off_and_holds_the_next_call():
    scaler = DynamicScaler(update_freq=1)
    _, first = scaler.scale_tensor(_tensor(1.0))
    assert scaler.check_overflow(torch.tensor([1.0, math.inf]))
    _, second = scaler.scale_tensor(_tensor(1024.0))
    _, third = scaler.scale_tensor(_tensor(1024.0))
    assert second == torch.tensor(first * 0.99).item()
    assert third == _mean([_scale_of(1.0), _scale_of(1024.0)])
    assert scaler.overflow_count == 1


def test_overflows_add_up():
    scaler = DynamicScaler()
    scaler.scale_tensor(_tensor(1.0))
    for _ in range(69):
        assert scaler.check_overflow(torch.tensor([math.nan]))
    assert scaler.scale < E5M2.max / 2  # one binade takes 69 of them
    assert scaler.overflow_count == 69


def test_finite_tensors_and_codes_are_no_overflow():
    scaler = DynamicScaler()
    codes, scale = scaler.scale_tensor(_tensor(7.0))
    assert not scaler.check_overflow(codes)
    assert not scaler.check_overflow(codes.float() / scale)
    assert not scaler.check_overflow(torch.zeros(0))
    assert scaler.scale == scale
    broken, _ = scaler.scale_tensor(torch.tensor([1.0, math.inf]))
    assert scaler.check_overflow(broken)


def test_zeros_stay_zeros_and_leave_the_window():
    scaler = DynamicScaler(update_freq=1)
    for x in (torch.zeros(4), torch.zeros(0)):
        codes, scale = scaler.scale_tensor(x)
        assert scale == 1.0
        assert not codes.float().any()
    _, before = scaler.scale_tensor(_tensor(3.0))
    _, after = scaler.scale_tensor(torch.zeros(4))
    assert before == after
    assert list(scaler.history) == [_scale_of(3.0)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_broken_element_breaks_itself_alone(bad):
    scaler = DynamicScaler(update_freq=1)
    codes, scale = scaler.scale_tensor(torch.tensor([4.0, bad, -1.0]))
    assert scale == _scale_of(4.0)
    values = (codes.float() / scale).tolist()
    assert values[::2] == [4.0, -1.0]
    assert not math.isfinite(values[1])
    _, next_scale = scaler.scale_tensor(_tensor(4.0))
    assert next_scale == scale


def test_a_tensor_beyond_the_window_saturates():
    scaler = DynamicScaler(update_freq=2)
    scaler.scale_tensor(_tensor(1.0))
    codes, _ = scaler.scale_tensor(_tensor(64.0))
    assert codes.float().tolist() == [E5M2.max, -E5M2.max, 0.0]


@pytest.mark.parametrize("arguments", [{"history_size": 0}, {"update_freq": 0}, {"update_freq": 1.5}])
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match="whole number"):
        DynamicScaler(**arguments)


def test_integers_are_refused():
    scaler = DynamicScaler()
    with pytest.raises(ConfigError, match="float"):
        scaler.scale_tensor(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="floating"):
        scaler.check_overflow(torch.ones(2, dtype=torch.int64))
