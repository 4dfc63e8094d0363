"""What ``torch.compile`` makes of octavo's operators on a GPU, traced and built in a process of its own without one."""

import pytest

from tests.triton.conftest import PrintedBy

pytestmark = pytest.mark.long

OPERATORS = {"cast", "cast of a transpose", "cast_both_ways", "norm_backward", "activation_backward"}


@pytest.fixture(scope="module")
def lines(printed_by: PrintedBy) -> list[dict]:
    return printed_by("tests.triton.traced_kernels", TRITON_DISABLE_LINE_INFO="1")


@pytest.fixture(scope="module")
def launches(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "operator" in line and "kernel" in line]


def test_every_operator_is_seen_through(launches: list[dict]) -> None:
    assert {launch["operator"] for launch in launches} == OPERATORS


def test_operator_inputs_are_not_marked_as_mutated(launches: list[dict]) -> None:
    """It would be copied first, which costs more than the cast."""
    assert all(launch["written"] for launch in launches)
    assert not [launch for launch in launches if launch["given"]]


def test_codes_are_written_in_a_dtype_of_their_own(lines: list[dict]) -> None:
    """max-autotune would otherwise time a GEMM with bytes, which no GEMM template takes."""
    graphs = [line for line in lines if "views_codes" in line]
    assert {graph["operator"] for graph in graphs} == OPERATORS
    assert not any(graph["views_codes"] for graph in graphs)


def test_inductors_copy_of_a_kernel_is_the_same_machine_code(lines: list[dict], launches: list[dict]) -> None:
    builds = {line["kernel"]: line["same"] for line in lines if "same" in line}
    assert builds == dict.fromkeys({launch["kernel"] for launch in launches}, True)
