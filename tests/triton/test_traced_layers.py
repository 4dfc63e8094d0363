"""What ``torch.compile`` makes of layers on a GPU, computed in a process of its own without one."""

import pytest

from tests.triton.conftest import PrintedBy
from tests.triton.traced_layers import RECIPES, STEPS

pytestmark = pytest.mark.long

SUMS = 1e-6  # what other orders of FP32 sums, and another exp, come to; a code that differs would be 1e-4 and more


@pytest.fixture(scope="module")
def lines(printed_by: PrintedBy) -> list[dict]:
    return printed_by("tests.triton.traced_layers", CUDA_VISIBLE_DEVICES="")


def test_every_step_was_launched(lines: list[dict]) -> None:
    cases = [(kind, recipe) for kind, recipes in RECIPES.items() for recipe in recipes]
    assert [(line["layer"], line["recipe"]) for line in lines] == [case for case in cases for _ in range(STEPS)]
    assert all(line["launched"] for line in lines)


def test_outputs_gradients_histories_and_counts_are_those_of_the_uncompiled_layer(lines: list[dict]) -> None:
    for line in lines:
        bound = 0 if line["layer"] == "linear" else SUMS
        worst = max(line["distances"], key=line["distances"].get)
        assert line["distances"][worst] <= bound, f"{worst} of {line['layer']}, {line['recipe']}"


def test_a_tensor_with_a_scale_of_its_own_is_measured_once_a_step(lines: list[dict]) -> None:
    """Input, weight and gradient; backward casts the weight again, by the amax that forward found."""
    for line in lines:
        if (line["layer"], line["recipe"]) == ("linear", "tensorwise"):
            kernels = line["launched"]
            assert (kernels.count("measure_tensor_kernel"), kernels.count("cast_tensor_kernel")) == (3, 4)
