"""Paired differences against numpy and scipy-free textbook formulae; curves against hand-worked points."""

import json
import math

import numpy as np
import pytest

from octavo.checksums import unsealed
from octavo.errors import DataError
from octavo.training.comparison import Study, paired_gap, steps_to, value_at
from tests.unit.training.synthetic_study import run, study


def test_gap_is_the_paired_mean_and_its_standard_error():
    generator = np.random.default_rng(0)
    base = generator.normal(3.0, 0.5, 200)
    other = base + generator.normal(0.004, 0.01, 200)
    gap = paired_gap(other.tolist(), base.tolist())
    assert gap.nats == pytest.approx((other - base).mean(), rel=1e-12)
    assert gap.standard_error == pytest.approx((other - base).std(ddof=1) / math.sqrt(200), rel=1e-12)
    assert gap.percent == pytest.approx(100 * (math.exp((other - base).mean()) - 1), rel=1e-12)


def test_pairing_removes_the_spread_of_the_windows():
    """Windows spread over 0.4 nats, the runs differ by a constant: an unpaired error would be about 0.07."""
    assert study().gap("tensorwise", "bf16").standard_error < 1e-12


def test_one_window_has_a_gap_but_no_error():
    gap = paired_gap([2.5], [2.0])
    assert gap.nats == 0.5
    assert math.isnan(gap.standard_error)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_unpaired_windows_are_refused(a, b):
    with pytest.raises(ValueError, match="same windows"):
        paired_gap(a, b)


def test_curve_values_are_numpys_interpolation():
    curve = ((0, 9.0), (10, 5.0), (30, 4.0), (35, 4.5))
    for step in (-5, 0, 3, 10, 17.5, 30, 33, 35, 99):
        assert value_at(curve, step) == pytest.approx(np.interp(step, [s for s, _ in curve], [v for _, v in curve]))


@pytest.mark.parametrize(
    ("target", "step"), [(9.5, 0.0), (9.0, 0.0), (7.0, 5.0), (5.0, 10.0), (4.5, 20.0), (4.0, 30.0), (3.9, None)]
)
def test_first_step_at_the_target(target, step):
    assert steps_to(((0, 9.0), (10, 5.0), (30, 4.0), (35, 4.5)), target) == step


def test_baseline_takes_ninety_percent_of_its_steps_to_its_own_target():
    assert study().steps_to_target("fp32") == pytest.approx(360, abs=1e-9)


def test_variance_is_relative_to_the_baseline():
    assert study().relative_variance("tensorwise") == pytest.approx(1.05)
    assert study(run("fp32", 0, gradient_variance=None)).relative_variance("fp32") is None


def test_study_round_trips_through_json():
    assert Study.from_json(study().to_json()) == study()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 0}', '{"format": 1, "runs": []}', study().to_json()[:500]]
)
def test_damaged_study_file_is_refused(text):
    with pytest.raises(DataError, match="run the study again"):
        Study.from_json(text)


@pytest.mark.parametrize("key", ["window_nats", "tokens_per_second", "unigram_nats", "validation_curve"])
def test_a_changed_number_is_refused(key):
    text = study().to_json()
    place = text.index(f'"{key}"')
    digit = next(index for index in range(place, len(text)) if text[index].isdigit())
    with pytest.raises(DataError, match=r"a value in it was changed.*run the study again"):
        Study.from_json(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])


@pytest.mark.parametrize(
    ("name", "value"),
    [("window_nats", "123"), ("window_nats", ["a"]), ("steps", 1.5), ("train_curve", [[1, 2, 3]]), ("recipe", None)],
)
def test_value_of_another_type_is_refused_by_name(name, value):
    fields = json.loads(study().to_json())
    fields.pop("sha256", None)
    fields["runs"][0][name] = value
    with pytest.raises(DataError, match=rf"{name}.* must .*run the study again"):
        Study.from_json(json.dumps(fields))


def test_study_without_recorded_threads_is_read():
    fields = unsealed(json.loads(study().to_json()))
    for each in fields["runs"]:
        del each["threads"]
    assert [run.threads for run in Study.from_json(json.dumps(fields)).runs] == [()] * 3
