"""What is over is a note, and only what is over."""

from dataclasses import replace

import pytest

from octavo.doctor import Severity, diagnose, series_of
from octavo.doctor.statistics import CAST_FIELDS
from tests.unit.doctor.synthetic_series import FIRST, healthy_sample, steps

LOST, ENERGY = CAST_FIELDS.index("underflow_fraction"), CAST_FIELDS.index("flushed_energy")
MENDED = healthy_sample("rowwise")
ACT = {
    "kind": "autopilot", "step": 20, "finding": "bulk-underflow", "path": FIRST, "role": "input", "number": 1,
    "act": "Run first with rowwise.", "changes": {"overrides": {FIRST: "rowwise"}}, "evidence": {},
}  # fmt: skip
TAKEN_BACK = {**ACT, "step": 40, "takes_back": 1}


def found(*events, mended=True, again=()):
    """Looks at 5, 10, ..., 40, of which the first four lose much of an input, and the layer runs rowwise then."""
    samples = []
    for look in range(1, 9):
        base = MENDED if mended and look > 4 else healthy_sample("tensorwise")
        casts = {key: numbers.copy() for key, numbers in base.casts.items()}
        for key, numbers in casts.items():
            if key[:2] == (FIRST, "input") and (look <= 4 or look in again):
                numbers[LOST], numbers[ENERGY] = 0.6 if look <= 4 else 0.3, 0.01
        samples.append(replace(base, step=5 * look, casts=casts))
    return diagnose(series_of([*steps([3.0] * 40), *events], samples))


def severities(*events, **options):
    return [(one.code, one.severity) for one in found(*events, **options)]


def test_finding_resolved_by_the_autopilot_is_a_note_with_its_step():
    (one,) = found(ACT)
    assert (one.code, one.severity, one.path) == ("bulk-underflow", Severity.NOTE, FIRST)
    assert (one.first_step, one.last_step, one.evidence["mended_at"]) == (5, 20, 20)
    assert one.cause.endswith("; resolved at step 20")


@pytest.mark.parametrize(
    "events",
    [(), (ACT | {"path": "elsewhere"},), (ACT, TAKEN_BACK | {"helped": False}), (ACT | {"changes": {}},)],
)
def test_unresolved_finding_keeps_its_severity(events):
    assert severities(*events) == [("bulk-underflow", "fail")]


def test_action_undone_after_it_helped_counts_as_resolved():
    assert severities(ACT, TAKEN_BACK | {"helped": True}) == [("bulk-underflow", "note")]


def test_action_without_effect_on_the_layer_resolves_nothing():
    assert severities(ACT, mended=False) == [("bulk-underflow", "fail")]


def test_recurring_finding_has_the_steps_and_severity_of_its_recurrence():
    (one,) = found(ACT, again=(6, 7, 8))
    assert (one.severity, one.first_step, one.last_step) == (Severity.WARN, 30, 40)


def test_finding_is_resolved_by_a_later_remedy_after_an_earlier_one_failed():
    early = ACT | {"step": 10}
    again = ACT | {"number": 2}
    assert severities(early, TAKEN_BACK | {"step": 20, "helped": False}, again) == [("bulk-underflow", "note")]


FAILURE = {"kind": "failure", "step": 20, "loss": None, "grad_norm": None, "tensor": "output of first"}


def nan_at(look, *, finished):
    samples = []
    for number in range(1, 5):
        base = healthy_sample("tensorwise")
        casts = {key: numbers.copy() for key, numbers in base.casts.items()}
        for key, numbers in casts.items():
            numbers[CAST_FIELDS.index("nonfinite")] = 3 if number == look and key.role != "weight" else 0
        samples.append(replace(base, step=5 * number, casts=casts))
    lines = steps([3.0] * finished)
    return diagnose(series_of([*lines, FAILURE], samples))


def test_a_step_that_broke_and_was_made_again_is_a_note():
    (one,) = nan_at(4, finished=20)
    assert (one.code, one.severity, one.first_step, one.path) == ("nonfinite", Severity.NOTE, 20, FIRST)
    assert one.cause.endswith(
        "the first non-finite tensor of the failed step is the output of first; resolved at step 20"
    )
    (one,) = nan_at(0, finished=20)
    assert (one.severity, one.path) == (Severity.NOTE, "")
    assert one.cause.endswith("first in the output of first; resolved at step 20")


def test_a_step_that_broke_for_good_fails():
    (one,) = nan_at(4, finished=19)
    assert (one.code, one.severity) == ("nonfinite", Severity.FAIL)
    assert "resolved" not in one.cause
    (one,) = nan_at(0, finished=19)
    assert one.severity is Severity.FAIL


def test_nan_at_a_finished_step_is_not_resolved_by_the_replay_of_another():
    (one,) = nan_at(3, finished=20)
    assert (one.severity, one.first_step) == (Severity.FAIL, 15)
