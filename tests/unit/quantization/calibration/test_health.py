import pytest
import torch

import octavo
from octavo.formats import E4M3
from octavo.numerics import flushed_energy, saturation_fraction, sqnr_db, underflow_fraction
from octavo.quantization.calibration.health import LayerHealth, health_of, health_warnings
from octavo.quantization.calibration.magnitude_histogram import MagnitudeCounts


def magnitudes(x):
    counts = MagnitudeCounts()
    counts.add(x)
    return counts.magnitudes()


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_numbers_are_the_metrics_of_the_tensor_itself(share, spread):
    """``share`` of the range clips; ``spread`` puts a part of the values into the subnormals and below."""
    torch.manual_seed(0)
    x = torch.exp(spread * torch.randn(20_000)) * torch.randn(20_000)
    scale = octavo.quantize(x, E4M3).scale * share
    q = octavo.quantize(x, E4M3, scale=scale)
    found = health_of("a", magnitudes(x), scale, E4M3, early_scale=2 * float(scale), weight_sqnr_db=30.0)
    assert found.amax == x.abs().max()
    assert found.scale == float(scale)
    assert found.sqnr_db == pytest.approx(sqnr_db(x, q.dequantize()), abs=0.1 if spread == 1 else 2.0)
    assert found.underflow_fraction == pytest.approx(underflow_fraction(x, q), rel=0.02, abs=1e-4)
    assert found.flushed_energy == pytest.approx(flushed_energy(x, q), rel=0.1, abs=1e-9)
    assert found.clipped_fraction == pytest.approx(saturation_fraction(x, q), rel=0.1, abs=1e-4)
    beyond = x.abs() > float(scale) * 464
    assert found.clipped_energy == pytest.approx(float(x[beyond].square().sum() / x.square().sum()), rel=0.05, abs=1e-6)
    assert found.peak == pytest.approx(float(x.abs().max() / x.square().mean().sqrt()), rel=1e-2)
    assert found.moved == pytest.approx(0.5)
    assert found.weight_sqnr_db == 30.0
    assert (found.clipped_fraction == 0) == (share == 1.0)


def test_zeros_are_healthy():
    found = health_of("a", magnitudes(torch.zeros(5)), torch.tensor(1.0), E4M3)
    assert found.sqnr_db is None  # no noise
    assert (found.underflow_fraction, found.flushed_energy, found.clipped_fraction, found.peak) == (0, 0, 0, 0)
    assert found.moved is None


def layer(path="a", **numbers):
    healthy = {"sqnr_db": 31.5, "underflow_fraction": 0.01, "flushed_energy": 1e-9, "clipped_fraction": 0.0}
    return LayerHealth(path=path, amax=1.0, scale=1 / 448, **(healthy | numbers))


def warnings(*layers, samples=128):
    return list(health_warnings(layers, samples=samples))


def test_healthy_layers_give_no_warnings():
    quiet = [
        layer(),
        layer(underflow_fraction=0.1, flushed_energy=1e-7),  # SmolLM2's worst input
        layer(peak=1000.0),
        layer(moved=0.1),
        layer(clipped_fraction=1e-6),
        LayerHealth(path="of a run", amax=1.0, scale=1.0),
    ]
    assert warnings(*quiet) == []
    assert warnings(*quiet, samples=32) == []
    assert warnings(*quiet, samples=None) == []


@pytest.mark.parametrize(("numbers", "words"), [
    ({"underflow_fraction": 0.6}, "small values of 'a' (60.0%) become zero; clipping would not help"),
    ({"underflow_fraction": 0.2, "flushed_energy": 1e-3}, "small values of 'a' (20.0%)"),
    ({"moved": 0.11}, "the last quarter of the samples still moved the scale of 'a' (11.0%)"),
    ({"clipped_fraction": 1e-4, "clipped_energy": 0.9, "sqnr_db": 3.0}, "clipping costs 'a' (90.0%) of their energy"),
])  # fmt: skip
def test_each_fault_has_its_sentence(numbers, words):
    assert [words in sentence for sentence in warnings(layer(**numbers), layer("b"))] == [True]


def test_calibration_on_few_samples_gives_a_warning():
    assert warnings(samples=31) == [
        "31 samples are few: calibrate on 32 or more, of all kinds of text that will be served"
    ]


def test_the_worst_are_named_first_and_not_all_of_them():
    found = warnings(*(layer(str(i), moved=i / 10) for i in range(2, 8)))
    assert "'7' (70.0%), '6' (60.0%), '5' (50.0%) and 3 more layers" in found[0]
