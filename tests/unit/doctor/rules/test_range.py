"""Values that the format does not reach: each rule on both sides of each of its thresholds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import octavo
from octavo.doctor import Severity, Thresholds, series_of, watch
from octavo.doctor.remedies import remedies_for
from octavo.doctor.rules.range import bulk_underflow, gradient_underflow, saturation, zero_tensor
from tests.unit.doctor.synthetic_series import FIRST, looks

LIMITS = Thresholds()
MISSED = {(FIRST, "output"): {"sqnr_db": 15}}
INPUT, WEIGHT, GRADIENT = (FIRST, "input"), (FIRST, "weight"), (FIRST, "grad_output")


@pytest.mark.parametrize(
    ("fractions", "g", "found"),
    [
        ([0, 2e-5, 2e-5, 2e-5, 0, 0], 1.1, [Severity.WARN]),
        ([0, 2e-5, 2e-5, 2e-5, 0, 0], 4, [Severity.FAIL]),
        ([0, 2e-5, 2e-5, 1e-5, 2e-5, 0], 4, []),
        ([0.5, 0, 0.5, 0, 0.5, 0], 4, []),
    ],
)
def test_saturation_needs_three_samples_above_its_threshold(fractions, g, found):
    series = looks(casts={INPUT: {"saturation_fraction": fractions, "stale_ratio": g}})
    assert [one.severity for one in saturation(series, LIMITS)] == found


def test_block_scales_that_are_rounded_down_saturate():
    """No number is changed: what a real look at such a recipe shows, and one at scales rounded up does not."""
    rounded_down = list(saturation(looks("mxfp8", scale_rounding="floor"), LIMITS))
    assert len({(one.path, one.role) for one in rounded_down}) == 6
    assert not list(saturation(looks("mxfp8"), LIMITS))


def test_delayed_scales_are_judged_by_how_far_they_lag():
    assert not list(saturation(looks("delayed", casts={INPUT: {"saturation_fraction": 0.01}}), LIMITS))


@pytest.mark.parametrize(
    ("lost", "found"),
    [(0.1, [Severity.WARN]), (0.099, []), (0.5, [Severity.FAIL]), ([1, 1, 0, 1, 1, 0], [])],
)
@pytest.mark.parametrize(
    ("rule", "place", "code"),
    [
        (gradient_underflow, GRADIENT, "gradient-underflow"),
        (bulk_underflow, INPUT, "bulk-underflow"),
        (bulk_underflow, WEIGHT, "bulk-underflow"),
    ],
)
def test_underflow_needs_three_samples_of_at_least_a_tenth(rule, place, code, lost, found):
    result = list(rule(looks(casts={place: {"underflow_fraction": lost}}, products=MISSED), LIMITS))
    assert [(one.code, one.role, one.severity) for one in result] == [(code, place[1], severity) for severity in found]


@pytest.mark.parametrize(
    ("place", "numbers", "gemm", "severity"),
    [
        (INPUT, {}, {}, Severity.NOTE),
        (WEIGHT, {}, {}, Severity.NOTE),
        (INPUT, {"underflow_fraction": 0.49}, {}, Severity.NOTE),
        (INPUT, {"underflow_fraction": 0.5}, {}, Severity.WARN),
        (INPUT, {"underflow_fraction": 0.5}, {"output": 15}, Severity.FAIL),
        (INPUT, {"flushed_energy": 1e-4}, {}, Severity.NOTE),
        (INPUT, {"flushed_energy": 1.1e-4}, {}, Severity.WARN),
        (INPUT, {"sqnr_db": 24}, {}, Severity.NOTE),
        (INPUT, {"sqnr_db": 23.9}, {}, Severity.WARN),
        (INPUT, {"sqnr_db": [30, 30, 23.9, 30, 30, 30]}, {}, Severity.WARN),
        (INPUT, {"sqnr_db": [5, 30, 30, 30, 30, 30], "underflow_fraction": [0, *[0.42] * 5]}, {}, Severity.NOTE),
        (INPUT, {}, {"output": 21.5}, Severity.NOTE),
        (INPUT, {}, {"output": 21.4}, Severity.WARN),
        (INPUT, {}, {"output": [0, 0, 30, 30, 30, 30]}, Severity.NOTE),
        (INPUT, {"underflow_fraction": [0.42] * 3 + [0] * 3}, {"output": [15, 15, 15, 30, 30, 30]}, Severity.WARN),
        (INPUT, {"underflow_fraction": [0.42] * 3 + [0] * 3}, {"output": [30, 30, 30, 0, 0, 0]}, Severity.NOTE),
        (INPUT, {}, {"grad_weight": 21.4}, Severity.WARN),
        (INPUT, {}, {"grad_input": 5}, Severity.NOTE),
        (WEIGHT, {}, {"grad_input": 21.4}, Severity.WARN),
        (WEIGHT, {}, {"grad_weight": 5}, Severity.NOTE),
        (INPUT, {}, {"output": math.nan}, Severity.NOTE),
        (INPUT, {}, {"output": math.nan, "grad_weight": math.nan}, Severity.WARN),
    ],
)
def test_underflow_that_no_gemm_loses_is_less_severe(place, numbers, gemm, severity):
    changes = {place: {"underflow_fraction": 0.42, **numbers}}
    products = {(FIRST, name): {"sqnr_db": value} for name, value in gemm.items()}
    (found,) = bulk_underflow(looks(casts=changes, products=products), LIMITS)
    assert found.severity is severity


@pytest.mark.parametrize(
    ("floor", "size", "cause", "remedy"),
    [
        (1e-12, 1e-30, "amax is {:.3g}, which the recipe's amax_floor raises to 1e-12", "Leave amax_floor at 0"),
        (0.0, 2.0**-147, "amax is {:.3g}, too small for any FP32 scale to bring to the format's range", "Find why"),
    ],
)
def test_gradient_flushed_by_an_amax_floor_names_the_floor_as_cause(floor, size, cause, remedy):
    """Real looks: at gradients of 1e-30 under torchao's floor, and at FP32's smallest numbers under none."""
    series, amax = small_gradients(floor, size)
    (found,) = gradient_underflow(series, LIMITS)
    assert found.cause == "100% of the nonzero elements become zero: " + cause.format(amax)
    assert found.evidence["amax_floor"] == floor
    assert [one.text.startswith(remedy) for one in remedies_for(found, series)] == [True, False]


def test_small_gradients_do_not_underflow():
    assert not list(gradient_underflow(small_gradients(0.0, 1e-30)[0], LIMITS))


def small_gradients(floor, size):
    """Three looks at a layer whose gradients are that small, and their amax."""
    recipe = octavo.recipes.get("tensorwise")
    assert recipe.grad_input.a is not None
    backward = replace(recipe.grad_input.a, amax_floor=floor)
    recipe = replace(
        recipe, grad_input=replace(recipe.grad_input, a=backward), grad_weight=replace(recipe.grad_weight, a=backward)
    )
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    octavo.convert(model, recipe, convert_head=True)
    watcher, grad_output = watch(model, interval=1), torch.randn(256, 64).clamp(-2, 2) * size
    for _ in range(3):
        with watcher.step():
            model(torch.randn(256, 64)).backward(grad_output)
    return series_of([], list(watcher.samples)), grad_output.abs().max().item()


def test_a_gradient_that_no_gemm_misses_is_missed_all_the_same():
    """A log-normal one had 31.7 dB with 62 % flushed."""
    (found,) = gradient_underflow(looks(casts={GRADIENT: {"underflow_fraction": 0.62}}), LIMITS)
    assert found.severity is Severity.FAIL


def test_tiny_softmax_outputs_are_a_note_and_outweighed_tokens_a_warning():
    """A real look: the outputs of a softmax of large logits; and tokens that outweigh all others, one in the sample."""
    torch.manual_seed(0)
    x = (4 * torch.randn(256, 64)).softmax(-1)
    outweighed = torch.randn(256, 64)
    outweighed[::64] *= 2.0**20
    assert [one.severity for one in underflow_of(x)] == [Severity.NOTE]
    assert [one.severity for one in underflow_of(outweighed)] == [Severity.WARN]


def underflow_of(x):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    octavo.convert(model, "tensorwise", convert_head=True)
    watcher = watch(model, interval=1)
    for _ in range(3):
        with watcher.step():
            (model(x) * torch.randn(256, 64)).sum().backward()
    return bulk_underflow(series_of([], list(watcher.samples)), LIMITS)


def test_underflow_rules_ignore_the_roles_of_each_other():
    assert not list(gradient_underflow(looks(casts={INPUT: {"underflow_fraction": 1}}), LIMITS))
    assert not list(bulk_underflow(looks(casts={GRADIENT: {"underflow_fraction": 1}}), LIMITS))


def test_outlier_underflow_reports_the_amax_to_rms_ratio():
    changes = {INPUT: {"underflow_fraction": 0.62, "amax": 65536, "rms": 4}}
    (found,) = bulk_underflow(looks(casts=changes, products=MISSED), LIMITS)
    assert found.cause == (
        "62% of the nonzero elements become zero: amax is 1.64e+04x the rms, and under its scale the bulk lie "
        "below the range of E4M3"
    )
    assert (found.evidence["underflow_fraction"], found.evidence["peak"]) == (0.62, 16384)


def test_an_outlier_alone_is_no_finding():
    """Amax over rms of 2^13 and a kurtosis of hundreds, with nothing lost."""
    changes = {INPUT: {"amax": 2.0**13, "rms": 1, "kurtosis": 700, "underflow_fraction": 0.01}}
    assert not list(bulk_underflow(looks(casts=changes), LIMITS))


ZEROS = {"amax": 0, "rms": 0, "zero_fraction": 1, "kurtosis": math.nan, "underflow_fraction": math.nan}


@pytest.mark.parametrize("place", [INPUT, WEIGHT, GRADIENT])
def test_zero_tensor_needs_three_consecutive_samples(place):
    (found,) = zero_tensor(looks(count=3, casts={place: ZEROS}), LIMITS)
    assert (found.role, found.severity) == (place[1], Severity.WARN)
    assert found.cause == f"every element of this {place[1]} is exactly zero in 3 consecutive samples"
    assert not list(zero_tensor(looks(count=2, casts={place: ZEROS}), LIMITS))


@pytest.mark.parametrize(
    ("place", "fraction", "found"),
    [(WEIGHT, 0.25, 1), (WEIGHT, 0.24, 0), (INPUT, 0.95, 0), (GRADIENT, 0.999, 0)],
)
def test_only_weights_have_no_zeros_of_their_own(place, fraction, found):
    """Zeros from a ReLU or a mask are healthy."""
    assert len(list(zero_tensor(looks(casts={place: {"zero_fraction": fraction}}), LIMITS))) == found


def test_a_tensor_without_a_finite_element_is_not_zero():
    assert not list(zero_tensor(looks(casts={INPUT: ZEROS | {"nonfinite": 10}}), LIMITS))


def test_an_rms_that_is_zero_is_no_number_to_divide_by():
    changes = {"underflow_fraction": 0.2, "amax": [0, 0, 0, 1e-30, 1e-30, 1e-30], "rms": 0}
    series = looks(casts={INPUT: changes})
    with np.errstate(all="ignore"):  # as diagnose has it
        (found,) = bulk_underflow(series, LIMITS)
    assert "amax is far beyond the rms" in found.cause


@pytest.mark.parametrize("margin", [0, 20])
def test_underflow_names_the_recipes_margin(margin):
    """A margin of 20 alone puts this layer's values below E4M3's range."""
    lost = {INPUT: {"underflow_fraction": 0.9}}
    found = list(bulk_underflow(looks("delayed", margin=margin, casts=lost, products=MISSED), LIMITS))
    assert found
    assert {"under its scale with a margin of 20 powers of two the bulk" in one.cause for one in found} == {margin > 0}
