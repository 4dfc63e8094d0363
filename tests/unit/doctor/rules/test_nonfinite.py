"""NaN and ±Inf: the first cast in time and in the order of a step, and what a loss scale absorbs."""

import math

import pytest

from octavo.doctor import Severity, Thresholds, series_of
from octavo.doctor.remedies import remedies_for
from octavo.doctor.rules.nonfinite import nonfinite
from tests.unit.doctor.synthetic_series import FIRST, SECOND, looks, steps

LIMITS = Thresholds()


def findings(casts=None, lines=(), **options):
    return list(nonfinite(looks(casts=casts or {}, lines=lines, **options), LIMITS))


def test_the_first_in_time():
    (found,) = findings(
        {
            (SECOND, "input"): {"nonfinite": [0, 0, 3, 3, 0, 0]},
            (FIRST, "input"): {"nonfinite": [0, 0, 0, 7, 0, 0]},
        }
    )
    assert (found.path, found.role, found.first_step, found.last_step) == (SECOND, "input", 15, 20)
    assert found.evidence["nonfinite"] == 3


def test_the_first_in_the_order_of_a_step():
    broken = {"nonfinite": [0, 0, 0, 0, 0, 5]}
    (found,) = findings(
        {
            (FIRST, "grad_output"): broken,
            (SECOND, "grad_output"): broken,
            (SECOND, "weight"): broken,
        },
        interval=1,
    )
    assert (found.path, found.role) == (SECOND, "weight")
    assert found.cause == (
        "NaN or ±Inf reach this cast first (5 elements since the last sample), 2 later casts have them too"
    )


EVERYWHERE = {
    (path, role): {"nonfinite": [0, 0, 7, 7, 7, 7]} for path in (FIRST, SECOND) for role in ("weight", "input")
}


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ([math.nan] * 30, 1),
        ([2.0] * 10 + [math.inf] * 3, 11),
        ([2.0] * 10 + [math.nan] * 2, None),
        ([2.0] * 10 + [math.nan] * 10 + [2.0], None),
        ([], None),
    ],
)
def test_a_loss_that_stays_no_number(losses, since):
    """Every cast is finite."""
    found = findings(lines=steps(losses))
    assert [(one.path, one.severity, one.first_step) for one in found] == [("", Severity.FAIL, since)] * bool(since)
    assert all(f"the loss is NaN or ±Inf since step {since}, although every sampled cast" in one.cause for one in found)


def test_nonfinite_spread_by_an_update_between_samples_names_no_layer():
    losses = [2.0] * 12 + [math.nan] * 18
    (found,) = findings(EVERYWHERE, steps(losses))
    assert (found.path, found.role, found.first_step) == ("", "", 15)
    assert found.evidence == {"nonfinite": 28, "casts": 4, "weights": 2}
    assert found.cause == (
        "NaN or ±Inf are in 2 of 2 weights and 4 casts, in steps 11-15: an update spread them, and their origin is "
        "no longer visible; the loss is not finite from step 13 on"
    )
    (remedy,) = remedies_for(found, looks())
    assert "interval=1" in remedy.text


def test_nonfinite_in_several_weights_at_once_names_none_even_when_sampled_every_step():
    (found,) = findings(EVERYWHERE, interval=1)
    assert (found.path, found.cause) == (
        "", "the update before this step left NaN or ±Inf in 2 of 2 weights at once, and no cast had any before"
    )  # fmt: skip
    (found,) = findings({key: {"nonfinite": 7} for key in EVERYWHERE}, interval=1)
    assert (found.path, found.cause) == ("", "training began with NaN or ±Inf in 2 of 2 weights")


def test_nonfinite_weight_between_samples_is_named_if_no_earlier_cast_has_any():
    last = {"nonfinite": [0, 0, 0, 0, 0, 5]}
    (found,) = findings({(SECOND, "weight"): last, (FIRST, "grad_output"): last})
    assert (found.path, found.role) == (SECOND, "weight")
    assert found.cause.startswith("NaN or ±Inf are in this weight and no other (5 elements")
    (found,) = findings({(SECOND, "weight"): last, (FIRST, "input"): last})
    assert (found.path, found.evidence["weights"]) == ("", 1)


def test_nonfinite_between_samples_names_the_first_cast_if_no_update_spread_it():
    last = {"nonfinite": [0, 0, 0, 0, 0, 5]}
    (found,) = findings({(SECOND, "input"): last, (FIRST, "grad_output"): last})
    assert (found.path, found.role) == (SECOND, "input")
    assert found.cause == (
        "NaN or ±Inf reached this cast in steps 26-30, and no earlier cast of a step "
        "(5 elements since the last sample), 1 later casts have them too"
    )


def test_a_run_that_stopped_at_once_knows_the_first():
    failure = {"kind": "failure", "step": 30, "loss": None, "tensor": None}
    last = {"nonfinite": [0, 0, 0, 0, 0, 5]}
    (found,) = findings({(SECOND, "input"): last, (FIRST, "grad_output"): last}, [failure])
    assert found.cause.startswith("NaN or ±Inf reach this cast first")


def test_a_gradient_that_overflowed_under_a_loss_scale_was_made_again():
    broken = {(FIRST, "grad_output"): {"nonfinite": [0, 5, 0, 0, 0, 0]}}
    overflow = {"kind": "overflow", "step": 8, "loss_scale": 65536.0}
    assert not findings(broken, [overflow])
    assert findings(broken, [overflow | {"step": 11}])  # in another interval of looks
    (found,) = findings(broken, [overflow, {"kind": "failure", "step": 10, "tensor": None}])
    assert found.path == FIRST
    assert findings({(FIRST, "input"): {"nonfinite": [0, 5, 0, 0, 0, 0]}}, [overflow])


def test_a_failure_names_the_tensor():
    failure = {"kind": "failure", "step": 30, "loss": None, "tensor": "output of layers.0.norm"}
    (found,) = findings({(FIRST, "input"): {"nonfinite": [0, 0, 0, 0, 0, 5]}}, [failure])
    assert found.cause.endswith("the first non-finite tensor of the failed step is the output of layers.0.norm")


def test_a_failure_outside_of_every_cast():
    failure = {"kind": "failure", "step": 4, "loss": None, "tensor": "parameter embedding.weight"}
    (found,) = nonfinite(series_of([*steps([3.0] * 3), failure]), LIMITS)
    assert (found.path, found.first_step) == ("", 4)
    assert found.cause == "the step failed outside of every FP8 cast, first in the parameter embedding.weight"
    (found,) = nonfinite(series_of([failure | {"tensor": None}]), LIMITS)
    assert found.cause.endswith("a replay of its batches stayed finite")


def test_finite_tensors_are_no_finding():
    assert not findings()
