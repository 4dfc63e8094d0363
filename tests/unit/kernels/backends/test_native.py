"""When the native backend multiplies, when it hands over, and the words it refuses with."""

import pytest
import torch

from octavo.kernels import native_bindings
from octavo.kernels.backends.native import NativeBackend
from octavo.numerics import Accumulate, PerBlock
from tests.unit.kernels.matmul_problem import PROBLEM

built = pytest.mark.skipif(
    native_bindings.why_absent() is not None, reason=f"no native kernels: {native_bindings.why_absent()}"
)


@built
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"a_granularity": PerBlock(1, 128), "b_granularity": PerBlock(128, 128)}, None),
        ({"device": "cuda"}, "on cuda"),
        ({"accumulate": Accumulate.HOPPER_FAST}, "not as a tensor core does"),
        ({"a_granularity": PerBlock(1, 32), "b_granularity": PerBlock(1, 128)}, "not 32 and 128"),
        ({"a_dtype": torch.float8_e4m3fnuz}, "it multiplies E4M3 and E5M2"),
        ({"k": 0}, "an empty operand has no product"),
    ],
    ids=str,
)
def test_unsupported_problems_give_a_reason(changes, words):
    reason = NativeBackend().unsupported_reason(PROBLEM._replace(**changes))
    assert reason is None if words is None else words in str(reason)


def test_missing_extension_gives_its_reason(monkeypatch):
    monkeypatch.setattr(native_bindings, "_absence", "no compiler was found")
    assert NativeBackend().unsupported_reason(PROBLEM) == "there are no native kernels: no compiler was found"
