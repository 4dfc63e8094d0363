"""NaN and ±Inf: the first cast in time and in the order of a step, and what a loss scale absorbs."""

from octavo.doctor import Thresholds, series_of
from octavo.doctor.rules.nonfinite import nonfinite
from tests.unit.doctor.synthetic_series import FIRST, SECOND, looks, steps

LIMITS = Thresholds()


def findings(casts=None, lines=()):
    return list(nonfinite(looks(casts=casts or {}, lines=lines), LIMITS))


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
        }
    )
    assert (found.path, found.role) == (SECOND, "weight")
    assert found.cause == (
        "NaN or ±Inf reach this cast first (5 elements since the last look), 2 casts after it hold some too"
    )


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
    assert found.cause.endswith("the first tensor of the step that broke is the output of layers.0.norm")


def test_a_failure_outside_of_every_cast():
    failure = {"kind": "failure", "step": 4, "loss": None, "tensor": "parameter embedding.weight"}
    (found,) = nonfinite(series_of([*steps([3.0] * 3), failure]), LIMITS)
    assert (found.path, found.first_step) == ("", 4)
    assert found.cause == "the step broke outside of every FP8 cast, first in the parameter embedding.weight"
    (found,) = nonfinite(series_of([failure | {"tensor": None}]), LIMITS)
    assert found.cause.endswith("a replay of its batches stayed finite")


def test_finite_tensors_are_no_finding():
    assert not findings()
