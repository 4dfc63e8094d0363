"""What the tests of each cast compare with the engine's own code: tensors, given scales and amaxes, and results.

Those tests take their tensors from here, and ``test_proven_properties.py`` changes every field of every cast on the
same tensors: a field whose change the results do not show is not proven by them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from octavo.engines import EngineCast, quantize_as
from octavo.numerics import QuantizedTensor
from tests.oracle.engines.adversarial import FINITE, finite_tensors, nonfinite_tensors

__all__ = ["COMPARED", "Compared", "every_tensor"]

ALL = (*FINITE, "Inf", "NaN")
FP32_BF16 = (torch.float32, torch.bfloat16)
WITH_FP16 = (*FP32_BF16, torch.float16)


def codes_and_scale(q: QuantizedTensor) -> tuple[Tensor, ...]:
    """Bytes, all NaN alike, and scales."""
    return torch.where(q.data.float().isnan(), 0xFF, q.data.view(torch.uint8)), q.scale


def decoded(q: QuantizedTensor) -> tuple[Tensor, ...]:
    """Codes times scales, as code that makes neither gives them."""
    return (q.dequantize(),)


def decoded_and_scale(q: QuantizedTensor) -> tuple[Tensor, ...]:
    """The same, and the scale in the tensor's dtype."""
    return q.dequantize(), q.scale.to(q.hp_dtype)


def numbers_and_scale(q: QuantizedTensor) -> tuple[Tensor, ...]:
    """Codes as numbers, of which -0 is 0, and the scale in the tensor's dtype."""
    return q.data.float(), q.scale.to(q.hp_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Comparison of one cast with an engine's code.

    Attributes:
        names: of tensors.
        dtypes: of each.
        given: values of ``argument``; None where the cast measures the tensor.
        argument: of :func:`quantize_as`, "scale" or "amax".
        repeats: of the rows, where an engine takes whole blocks or the test a ragged one.
        seen: what of the result is compared.
    """

    names: tuple[str, ...] = ALL
    dtypes: tuple[torch.dtype, ...] = FP32_BF16
    given: tuple[float | None, ...] = (None,)
    argument: str = "scale"
    repeats: int = 1
    seen: Callable[[QuantizedTensor], tuple[Tensor, ...]] = codes_and_scale

    def results(self, cast: EngineCast) -> Iterator[tuple[Tensor, ...]]:
        """What is compared of a cast, tensor by tensor."""
        for dtype in self.dtypes:
            tensors = finite_tensors(dtype) | nonfinite_tensors(dtype)
            for name in self.names:
                x = tensors[name].repeat(self.repeats, 1)
                for value in self.given:
                    arguments = {} if value is None else {self.argument: torch.tensor(value, dtype=dtype).float()}
                    yield self.seen(quantize_as(x, cast, **arguments))


def every_tensor(engine: str, role: str) -> pytest.MarkDecorator:
    """Parametrize a test over the dtypes and tensors of a cast, and the given values if there are several."""
    compared = COMPARED[engine, role]
    cases: list[tuple[object, ...]] = list(product(compared.dtypes, compared.names, compared.given))
    if compared.given == (None,):
        return pytest.mark.parametrize(("dtype", "name"), [case[:2] for case in cases], ids=str)
    return pytest.mark.parametrize(("dtype", "name", "value"), cases, ids=str)


TE = Compared(names=FINITE, dtypes=WITH_FP16)
DEEP_GEMM = Compared(repeats=20)
GROUPS = Compared(names=tuple(name for name in FINITE if not name.startswith("rows")))  # those of "amaxes within" again
ROUNDED = Compared(dtypes=WITH_FP16, seen=decoded_and_scale)
CHANNELS = Compared(dtypes=WITH_FP16, seen=numbers_and_scale)
COMPARED: Mapping[tuple[str, str], Compared] = {
    ("te-current", "weight"): TE,
    ("te-current", "input"): TE,
    ("te-block", "weight"): TE,
    ("te-block", "input"): TE,
    ("torchao-tensorwise", "weight"): Compared(),
    ("torchao-tensorwise", "input"): Compared(),
    ("torchao-rowwise", "weight"): Compared(),
    ("torchao-rowwise", "input"): Compared(),
    ("compressed-tensors", "weight"): CHANNELS,
    ("compressed-tensors", "input"): ROUNDED,
    ("compressed-tensors-static", "weight"): CHANNELS,
    ("compressed-tensors-static", "input"): Compared(dtypes=WITH_FP16, given=(1e-3, 0.37, 2.0), seen=decoded),
    ("transformers-fp8", "weight"): Compared(repeats=16),
    ("vllm-tensor", "input"): Compared(given=(1e-3, 0.37)),
    ("vllm-token", "input"): Compared(),
    ("vllm-fnuz", "input"): Compared(),
    ("vllm-block", "weight"): DEEP_GEMM,
    ("vllm-block-cuda", "weight"): DEEP_GEMM,
    ("vllm-block-ue8m0", "weight"): DEEP_GEMM,
    ("vllm-block", "input"): GROUPS,
    ("vllm-block-ue8m0", "input"): GROUPS,
    ("sglang-block", "input"): GROUPS,
    ("sglang-block-ue8m0", "input"): GROUPS,
    ("modelopt", "weight"): Compared(names=(*FINITE, "NaN")),
    ("modelopt", "input"): Compared(
        given=(3.5, 1e-9, 2.0**-24, 2.0**-24 * (1 + 2.0**-23), 1e-6, 3.0), argument="amax", seen=decoded
    ),
    ("modelopt-mxfp8", "weight"): Compared(),
    ("modelopt-mxfp8", "input"): Compared(),
}
