"""The histogram against the cast itself: what it calls flushed and saturated is what quantize flushes and saturates."""

import numpy as np
import pytest
import torch

import octavo
from octavo.doctor.histograms import Histogram
from octavo.errors import ConfigError
from octavo.formats import BF16, E4M3, E5M2, E8M0


def facts(values, form=E4M3, scale=1.0):
    return Histogram(path="proj", role="input", values=values, format=form, scale=scale).facts()


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_shares_are_those_of_the_cast(form):
    x = torch.randn(20_000) * torch.exp(6 * torch.randn(20_000))
    x[:500] = 0
    scale = 0.02 if form is E4M3 else 1.0
    made = octavo.quantize(x[None], form, scale=torch.tensor(scale)).dequantize()[0]
    found = facts(x, form, scale)
    nonzero = x != 0
    flushed = (made[nonzero] == 0).float().mean().item()
    beyond = (x.abs()[nonzero] > form.max * scale).float().mean().item()
    assert 0.02 < flushed < 0.6
    assert found["flushed"] == pytest.approx(flushed, abs=1e-4)  # one tie may be the scale's rounding
    assert found["saturated"] == pytest.approx(beyond, abs=1e-4)
    assert found["zeros"] == pytest.approx(500 / 20_000)


def test_bars_hold_every_nonzero_once_where_it_lies():
    x = torch.tensor([1.0, 1.1, 2.0, 4.0, 4.0, 0.0, torch.inf, torch.nan])
    found = facts(x)
    assert found["first"] == 0.0
    assert found["shares"] == [0.4, 0, 0, 0, 0.2, 0, 0, 0, 0.4]


def test_magnitudes_too_small_for_a_bar_are_counted_in_the_first():
    found = facts(torch.tensor([1.0, 1e-30]))
    assert len(found["shares"]) == 193
    assert (found["shares"][0], found["shares"][-1]) == (0.5, 0.5)


def test_the_grid_is_every_positive_value_of_the_format():
    grid = np.exp2(facts(torch.ones(3), E4M3, 2.0)["grid"])
    codes = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_allclose(grid, 2 * codes, rtol=1e-4)


@pytest.mark.parametrize("values", [torch.zeros(4), torch.empty(0), torch.full((3,), torch.nan)])
def test_a_tensor_without_nonzeros_has_no_bars(values):
    assert facts(values)["shares"] == []


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_decodes_nothing_is_refused(scale):
    with pytest.raises(ConfigError, match="positive and finite"):
        facts(torch.ones(1), scale=scale)


def test_a_format_without_zero_is_refused():
    with pytest.raises(ConfigError, match="E8M0 has no zero"):
        facts(torch.ones(1), E8M0)
    assert len(facts(torch.ones(1), BF16)["grid"]) == BF16.max_code
