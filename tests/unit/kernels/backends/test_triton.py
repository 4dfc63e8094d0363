"""What octavo's own kernel is asked for on a GPU, and what it refuses; that it multiplies stands in tests/triton."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
from octavo.kernels import explain
from octavo.kernels.backends import triton
from octavo.kernels.backends.triton import TritonBackend
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, QuantizedTensor
from tests.unit.kernels.matmul_problem import PROBLEM as TENSORWISE

PROBLEM = TENSORWISE._replace(
    m=256, n=256, k=256, device="cuda", a_granularity=PerBlock(1, 128), b_granularity=PerBlock(128, 128)
)
FAST, SLOW = Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW
ROWS = {"a_granularity": PerRow(), "b_granularity": PerRow()}
GROUPS = {"a_granularity": PerBlock(1, 32), "b_granularity": PerBlock(1, 32)}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(triton, "WHY_ABSENT", None)


@pytest.mark.parametrize(
    "changes",
    [
        {}, ROWS, GROUPS, {"b_granularity": PerTensor()}, {"a_granularity": PerBlock(1, 300)},
        {"a_granularity": PerBlock(1, 64), "b_granularity": PerRow()},
        {"accumulate": SLOW}, {"accumulate": FAST}, ROWS | {"accumulate": SLOW},
    ],
    ids=lambda changes: ", ".join(f"{name} {value}" for name, value in changes.items()),
)  # fmt: skip
def test_supported_problems_have_no_unsupported_reason(changes):
    assert TritonBackend().unsupported_reason(PROBLEM._replace(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "it runs on CUDA, and the operands are on cpu"),
        ({"a_dtype": torch.float8_e4m3fnuz}, "it multiplies E4M3 and E5M2"),
        ({"b_granularity": PerBlock(1, 64)}, "its blocks of K are as wide in both operands, not 64 and 128"),
        ({"a_granularity": PerBlock(1, 8), "b_granularity": PerRow()}, "its blocks of K are 32, 64, 128 wide, not 8"),
        (GROUPS | {"accumulate": SLOW}, "Hopper's sums can be scaled every 128 of K, not every 32"),
        (ROWS | {"accumulate": FAST}, "it starts a fresh chain every 128 of K"),
        ({"k": 0}, "an empty operand has no product"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_problems_give_a_reason(changes, reason):
    assert TritonBackend().unsupported_reason(PROBLEM._replace(**changes)) == reason


def test_unsupported_devices_and_missing_triton_are_explained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    older = "it is written for Hopper, compute capability 9.0, and this device has 8.9"
    assert TritonBackend().unsupported_reason(PROBLEM) == older
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert TritonBackend().unsupported_reason(PROBLEM) is None
    newer = "only Hopper sums as Hopper does, and this device has compute capability 10.0"
    assert TritonBackend().unsupported_reason(PROBLEM._replace(accumulate=SLOW)) == newer
    monkeypatch.setattr(triton, "WHY_ABSENT", "triton is not installed")
    assert TritonBackend().unsupported_reason(PROBLEM) == "triton is not installed"


def test_auto_takes_it_for_what_cublas_refuses(monkeypatch):
    gradients = PROBLEM._replace(a_dtype=torch.float8_e5m2, a_granularity=PerTensor(), b_granularity=PerTensor())
    assert explain(PROBLEM).backend == explain(gradients).backend == "triton"
    assert dict(explain(gradients).rejected) == {"torch_cuda": "cuBLAS does not multiply E5M2 by E5M2"}
    assert explain(gradients._replace(a_dtype=torch.float8_e4m3fn)).backend == "torch_cuda"
    assert explain(PROBLEM._replace(accumulate=SLOW)).backend == "triton"


def test_a_graph_has_one_operator():
    with FakeTensorMode():
        a, b = (torch.empty(rows, 256, device="cuda", dtype=torch.float8_e4m3fn) for rows in (5, 7))
        quantized = [
            QuantizedTensor(codes, torch.empty(codes.shape[0], 2, device="cuda"), PerBlock(1, 128), torch.bfloat16)
            for codes in (a, b)
        ]
        y = octavo.scaled_mm(*quantized, bias=torch.empty(7, device="cuda"), backend="triton")
        assert (y.shape, y.dtype, y.device.type) == ((5, 7), torch.bfloat16, "cuda")


def test_scale_or_bias_that_requires_a_gradient_is_rejected():
    for problem in (PROBLEM._replace(scale_needs_grad=True), PROBLEM._replace(bias_needs_grad=True)):
        selection = explain(problem)
        assert selection.backend == "reference"
        reason = "its kernels have no gradient, and a scale or the bias requires one"
        assert dict(selection.rejected)["triton"] == reason
