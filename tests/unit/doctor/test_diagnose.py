"""One cause is one finding: what it leads to is not listed beside it."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.doctor import Finding, Severity, Thresholds, diagnose, series_of
from octavo.doctor.diagnose import EXPLAINS
from octavo.doctor.findings import CAUSES
from octavo.doctor.rules import RULES
from tests.unit.doctor.synthetic_series import FIRST, SECOND, looks, steps

GROWN = [1, 1, 3, 3, 3, 3]
STALE = {"stale_ratio": GROWN, "saturation_fraction": [0, 0, 0.1, 0.1, 0.1, 0.1]}


def codes(series):
    return [(one.code, one.path, one.role) for one in diagnose(series)]


def raw(series):
    return {finding.code for rule in RULES for finding in rule(series, Thresholds())}


def test_stale_scale_explains_the_same_casts_underflow():
    series = looks("delayed", casts={(FIRST, "input"): {**STALE, "underflow_fraction": 0.2}})
    assert {"stale-scale", "bulk-underflow"} == raw(series)
    assert codes(series) == [("stale-scale", FIRST, "input")]


def test_frozen_scale_replaces_stale_scale_of_the_same_cast():
    amaxes = [1, 2, 3, 4, 5, 6]
    changes = {"amax": amaxes, "stale_ratio": amaxes, "scale": 1 / 448, "saturation_fraction": 0.1}
    series = looks("delayed", casts={(FIRST, "input"): changes})
    assert {"stale-scale", "frozen-scale"} == raw(series)
    assert codes(series) == [("frozen-scale", FIRST, "input")]


def test_constant_scale_in_a_dynamic_recipe_is_frozen():
    amaxes = [1, 2, 3, 4, 5, 6]
    changes = {"amax": amaxes, "stale_ratio": amaxes, "scale": 1 / 448, "saturation_fraction": 0.1}
    series = looks("tensorwise", casts={(FIRST, "input"): changes})
    assert {"inexact-amax", "frozen-scale", "saturation"} == raw(series)
    assert codes(series) == [("frozen-scale", FIRST, "input")]


def test_a_stale_weight_has_no_scale_of_its_own():
    changes = {"code_mismatch": 0.05, "stale_ratio": 1.01, "saturation_fraction": 1e-4}
    series = looks("tensorwise", casts={(FIRST, "weight"): changes})
    assert {"stale-weight", "inexact-amax", "saturation"} == raw(series)
    assert codes(series) == [("stale-weight", FIRST, "weight")]


def test_causes_at_two_places_are_two_findings():
    series = looks("delayed", casts={(FIRST, "input"): STALE, (SECOND, "weight"): STALE})
    assert codes(series) == [("stale-scale", FIRST, "input"), ("stale-scale", SECOND, "weight")]


def test_one_place_is_one_finding_however_often_it_is_cast():
    """Rowwise casts the weight for two GEMMs."""
    series = looks("rowwise", casts={(FIRST, "weight"): {"stale_ratio": 1.5}})
    assert len([key for key in series.casts.keys if key[:2] == (FIRST, "weight")]) == 2
    assert codes(series) == [("inexact-amax", FIRST, "weight")]


def test_severe_finding_explains_later_findings_in_other_layers():
    amaxes = [1, 2, 4, 8, 16, 32]
    frozen = {"amax": amaxes, "stale_ratio": amaxes, "scale": 1 / 448}
    later, earlier = {"stale_ratio": [1, 1, 1, 3, 3, 3]}, {"stale_ratio": [3, 3, 3, 1, 1, 1]}
    broken = {"nonfinite": [0, 0, 0, 0, 0, 9]}
    frozen_first = looks("delayed", casts={(FIRST, "input"): frozen, (SECOND, "input"): {**later, **broken}})
    assert {"stale-scale", "frozen-scale", "nonfinite"} == raw(frozen_first)
    assert codes(frozen_first) == [("frozen-scale", FIRST, "input")]
    stale_first = looks("delayed", casts={(SECOND, "input"): frozen, (FIRST, "input"): earlier})
    assert {code for code, _, _ in codes(stale_first)} == {"stale-scale", "frozen-scale"}


def test_accuracy_finding_explains_nothing_in_other_layers():
    mild = {"stale_ratio": 1.001}
    lossy = {"underflow_fraction": 0.2, "sqnr_db": 20}
    series = looks("tensorwise", casts={(FIRST, "input"): mild, (SECOND, "input"): lossy})
    assert codes(series) == [("bulk-underflow", SECOND, "input"), ("inexact-amax", FIRST, "input")]


def test_findings_after_the_first_nan_are_dropped():
    changes = {
        (FIRST, "input"): {"nonfinite": [0, 1, 1, 1, 1, 1]},
        (SECOND, "input"): {"stale_ratio": [1, 1, 3, 3, 3, 3]},
    }
    assert codes(looks("delayed", casts=changes)) == [("nonfinite", FIRST, "input")]


def test_noise_that_a_cast_makes_is_that_casts():
    changes = {(FIRST, "grad_output"): {"underflow_fraction": 0.3}}
    assert codes(looks(casts=changes, noise=0.5)) == [("gradient-underflow", FIRST, "grad_output")]
    assert codes(looks(noise=0.5)) == [("gradient-below-noise", "", "")]


def test_a_loss_scale_that_breaks_a_run_explains_its_nan():
    failure = {
        "kind": "failure",
        "step": 30,
        "loss": 5.0,
        "tensor": "gradient of the output of x",
        "loss_scale": 2.0**24,
    }
    changes = {(FIRST, "grad_output"): {"nonfinite": [0, 0, 0, 0, 0, 9]}}
    assert codes(looks(casts=changes, lines=[failure])) == [("loss-scale", "", "")]


def test_zeros_lead_to_zeros():
    """A weight of zeros, the zero gradients before it and the zero inputs after it are one thing."""
    zeros = {"amax": 0, "rms": 0, "zero_fraction": 1}
    changes = {(FIRST, "weight"): zeros, (SECOND, "input"): zeros, (FIRST, "grad_output"): zeros}
    assert codes(looks(casts=changes)) == [("zero-tensor", FIRST, "weight")]


def test_a_gap_stays_where_nothing_else_is_severe():
    lines, reference = steps([3 + 0.001 * i for i in range(60)]), steps([3.0] * 60)
    mild = {(FIRST, "grad_output"): {"underflow_fraction": 0.2}}
    severe = {(FIRST, "grad_output"): {"underflow_fraction": 0.6}}
    found = [
        {one.code for one in diagnose(looks(casts=casts, lines=lines), reference=looks(lines=reference))}
        for casts in (mild, severe)
    ]
    assert found == [{"loss-gap", "gradient-underflow"}, {"gradient-underflow"}]


def test_the_table_speaks_of_known_findings():
    named = set(EXPLAINS) | {code for reach in EXPLAINS.values() for code in reach.here | reach.later | reach.anyhow}
    assert named <= set(CAUSES)


def test_findings_come_worst_first():
    changes = {
        (FIRST, "grad_output"): {"underflow_fraction": 0.2},
        (SECOND, "grad_output"): {"underflow_fraction": 0.9},
        (SECOND, "input"): {"underflow_fraction": 0.3, "sqnr_db": 20},
    }
    found = diagnose(looks(casts=changes))
    assert [one.severity for one in found] == [Severity.FAIL, Severity.WARN, Severity.WARN]
    assert [one.evidence["underflow_fraction"] for one in found] == [0.9, 0.3, 0.2]


def test_thresholds_are_obeyed():
    series = looks(casts={(FIRST, "grad_output"): {"underflow_fraction": 0.2}})
    assert diagnose(series)
    assert not diagnose(series, Thresholds(underflow_fraction=0.3))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8"])
def test_healthy_samples_have_no_findings(recipe):
    assert diagnose(looks(recipe)) == []


def test_a_finding_prints_as_one_line():
    (found,) = diagnose(looks("delayed", casts={(FIRST, "input"): STALE}))
    assert isinstance(found, Finding)
    assert str(found) == (
        "warn: stale-scale at first, input, steps 15-30: the history of 16 steps lags: amax grew 3x since the scale "
        "was computed, 10.00% of the elements saturate"
    )


def test_of_two_causes_that_explain_each_other_the_first_in_the_table_stays():
    """A scale that jumps for a while and then stands still."""
    scales = np.array([1, 2, 1, 2, 1, 2, *[1] * 6]) / 448
    amaxes = np.array([1.0] * 6 + [1, 2, 3, 4, 5, 6])
    changes = {"amax": amaxes, "scale": scales, "stale_ratio": amaxes / (scales * 448)}
    series = looks("delayed", count=12, casts={(FIRST, "input"): changes})
    assert {"scale-oscillation", "frozen-scale"} <= raw(series)
    assert codes(series) == [("scale-oscillation", FIRST, "input")]


def test_a_note_explains_nothing():
    changes = {"rms": 1, "amax": [100, 100, 100, 2000, 2000, 2000], "underflow_fraction": 0.2, "sqnr_db": 20}
    found = codes(looks(casts={(FIRST, "input"): changes}))
    assert found == [("bulk-underflow", FIRST, "input"), ("outlier-growth", FIRST, "input")]


def test_consequences_are_counted_at_their_cause():
    series = looks("delayed", casts={(FIRST, "input"): {**STALE, "underflow_fraction": 0.2}})
    (found,) = diagnose(series)
    assert found.consequences == {"bulk-underflow": 1}
    assert str(found).endswith("; from it follow bulk-underflow (1)")


SPIKED = [6.2, 6.0, 5.8, 9.6, 9.7, 9.6, 6.0, *[5.0 - 0.02 * step for step in range(30)]]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (SPIKED, "; the reference does the same, so FP8 is not the cause"),
        ([6.2 - 0.03 * step for step in range(37)], "; the reference does not"),
    ],
)
def test_a_finding_about_the_loss_says_whether_the_reference_has_it(others, said):
    found = next(
        one
        for one in diagnose(series_of(steps(SPIKED)), reference=series_of(steps(others)))
        if one.code == "loss-spike"
    )
    assert found.cause.endswith(said)
    assert "reference" not in diagnose(series_of(steps(SPIKED)))[0].cause


def test_a_beginning_in_dropped_samples_is_not_named():
    series = looks("delayed", casts={(FIRST, "input"): {"stale_ratio": 3.0}, (SECOND, "input"): {"stale_ratio": GROWN}})
    found = {one.path: one for one in diagnose(replace(series, kept_from=5))}
    assert found[FIRST].steps == "until step 30"
    assert str(found[FIRST]).endswith("; samples before step 5 were dropped, and it may have begun in them")
    assert found[FIRST].when == "until step 30"
    assert (found[SECOND].steps, found[SECOND].may_be_older) == ("steps 15-30", False)
    assert not any(one.may_be_older for one in diagnose(series))
