"""FP8 GEMM on a CPU by torch's operations, of widened codes.

Every E4M3 and E5M2 code is exactly a bfloat16 value, and so is every product of two an FP32 value. The codes
are widened to FP32 and multiplied by an ordinary GEMM whose operands may be rounded to bfloat16: that changes no
code, the sums stay FP32, and CPUs with bfloat16 instructions run it about twice as fast. The scales (and the bias)
are applied to the FP32 sums, which are rounded once. Torch's own bfloat16 GEMM would round before the scale: a
different number. Block scales are applied to the FP32 sum of each block of K; powers of two are multiplied into the
widened codes instead, which is exact too and leaves one GEMM.

Torch widens E4M3 at about 0.5 Gelem/s. A code shifted into place is a float16 with its exponent 8 too small, which
takes four vectorised passes and is some seven times faster; NaN codes, the only ones that this misreads, are
detected and restored.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from octavo.kernels.backend import MatmulProblem, block_widths, product_shape
from octavo.numerics import Accumulate, QuantizedTensor
from octavo.numerics.quantized import rows_of_scales

__all__ = ["CpuBackend", "high_precision_mm", "needs_widening", "probe_cpu", "widen"]

_precision_lock = Lock()
_saved_precisions: list[str] = []


class CpuBackend:
    """FP32 GEMM of widened codes."""

    name = "torch_cpu"

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """None for FP32 sums on a CPU, unless scales change at different places along K or a graph needs gradients."""
        if problem.device != "cpu":
            return f"it runs on a CPU, and the operands are on {problem.device}"
        if problem.accumulate is not Accumulate.FP32:
            return "it sums in FP32, not as a tensor core does"
        if len(widths := block_widths(problem)) > 1:
            return f"its blocks of K are as wide in both operands, not {' and '.join(map(str, sorted(widths)))}"
        if problem.needs_grad and torch.compiler.is_compiling():
            return "its operator in a traced graph has no gradient, and a scale or the bias requires one"
        return None

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """See :class:`octavo.kernels.backend.Backend`."""
        block = max(block_widths(problem), default=0)
        # The operator is the same function behind 20 µs of dispatch.
        multiply = torch.ops.octavo.widened_mm if torch.compiler.is_compiling() else _widened_mm
        result: Tensor = multiply(a.data, rows_of_scales(a), b.data, rows_of_scales(b), bias, problem.out_dtype, block)
        return result


def widen(codes: Tensor) -> Tensor:
    """``codes.float()``, several times faster for E4M3 and E5M2 on a CPU; exact, NaN and ±Inf included.

    Example:
        >>> widen(torch.tensor([448.0, -0.5]).to(torch.float8_e4m3fn)).tolist()
        [448.0, -0.5]
    """
    return _shifted_into_place(codes).mul_(_unshift(codes))


def _shifted_into_place(codes: Tensor) -> Tensor:
    """The codes' values in float32, those of E4M3 divided by 2^8."""
    if codes.dtype is torch.float8_e5m2:  # the upper half of a float16
        return codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
    if codes.dtype is not torch.float8_e4m3fn or codes.numel() == 0:
        return codes.float()
    signed = codes.view(torch.int8)
    bits = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)  # sign extension leaves a 1 in bit 14
    values = bits.view(torch.float16).float()
    holds_nan = int((signed | -0x80).amax()) == -1  # all bits but the sign are ones
    return values.masked_fill_((signed & 0x7F) == 0x7F, math.nan) if holds_nan else values


def _unshift(codes: Tensor) -> float:
    """Divisor that :func:`_shifted_into_place` applied."""
    return 2.0**8 if codes.dtype is torch.float8_e4m3fn else 1.0


def high_precision_mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias`` of unquantized operands, summed in FP32 and rounded once to their dtype.

    Torch falls back to a scalar loop for 16-bit operands on a CPU without instructions for them, eight times and more
    slower than FP32. Widening the operands, which is exact, gives the same product at FP32's speed. Elsewhere a bias of
    another dtype is rounded to the operands' first, as ``torch.autocast`` does; on a GPU torch may round a bfloat16
    product before it adds the bias.

    Example:
        >>> high_precision_mm(torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16))
        tensor([[2.]], dtype=torch.bfloat16)
    """
    if needs_widening(a):
        with torch.autocast("cpu", enabled=False):  # it would narrow the operands again
            product = torch.mm(a.float(), b.float().t())
        return (product if bias is None else product + bias.float()).to(a.dtype)
    return torch.mm(a, b.t()) if bias is None else torch.addmm(bias.to(a.dtype), a, b.t())


def needs_widening(a: Tensor) -> bool:
    """Return whether this CPU multiplies ``a``'s dtype only in a scalar loop.

    Example:
        >>> needs_widening(torch.ones(1))
        False
    """
    return a.device.type == "cpu" and a.dtype in _NARROW and not _cpu_multiplies(a.dtype)


_NARROW = (torch.bfloat16, torch.float16)
_multiplied: dict[torch.dtype, bool] = {}  # filled once; the probe cannot be traced into a graph, this dict can


def probe_cpu() -> None:
    """Query which dtypes the processor multiplies, before graphs are traced that depend on it."""
    _multiplied[torch.bfloat16] = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
    _multiplied[torch.float16] = torch.ops.mkldnn._is_mkldnn_fp16_supported()  # noqa: SLF001


def _cpu_multiplies(dtype: torch.dtype) -> bool:
    if not _multiplied:
        if torch.compiler.is_compiling():
            return True  # traced: left to the compiler
        probe_cpu()
    return _multiplied[dtype]


@contextmanager
def _bf16_operands_allowed() -> Iterator[None]:
    """Let FP32 GEMMs round their operands to bfloat16 where oneDNN has instructions for it; exact for FP8 codes.

    The setting is the process's: of several threads inside, the last to leave restores the value from before the first.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _precision_lock:
        _saved_precisions.append(settings.fp32_precision)
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        with _precision_lock:
            previous = _saved_precisions.pop()
            if not _saved_precisions:
                settings.fp32_precision = previous


def _fp32_mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of float32 operands that hold bfloat16 values, summed in FP32."""
    if torch.is_autocast_enabled("cpu"):  # it would round the sums to bfloat16
        with torch.autocast("cpu", enabled=False):
            return _fp32_mm(a, b)
    if not _cpu_multiplies(torch.bfloat16):
        return torch.mm(a, b)
    with _bf16_operands_allowed():
        return torch.mm(a, b)


def _widened_mm(  # noqa: PLR0917 (an operator's schema)
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, block: int
) -> Tensor:
    """``block`` columns of K share a scale; 0 if all do. Scales are [R, blocks], with one row or column for all."""
    if _might_leave_range(a_scale, b_scale):
        left, right = (widen(q).double() * _spread(s.double(), q, block) for q, s in ((a, a_scale), (b, b_scale)))
        sums = (left @ right.t()).float()
    elif not block:
        sums = _fp32_mm(_shifted_into_place(a), _shifted_into_place(b).t())
        sums.mul_(a_scale * _unshift(a)).mul_((b_scale * _unshift(b)).t())
    elif _are_powers_of_two(a_scale, b_scale):
        left, right = (widen(q).mul_(_spread(s, q, block)) for q, s in ((a, a_scale), (b, b_scale)))
        sums = _fp32_mm(left, right.t())
    else:
        sums = _sums_of_scaled_blocks(widen(a), a_scale, widen(b), b_scale, block)
    if bias is not None:
        sums.add_(bias.float())
    return sums.to(out_dtype)


def _sums_of_scaled_blocks(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, block: int) -> Tensor:
    """Sum of the scaled GEMMs of the blocks of K: [M, N]."""
    total = a.new_zeros(a.shape[0], b.shape[0])
    a_scales, b_scales = a_scale.expand(-1, -(-a.shape[1] // block)), b_scale.expand(-1, -(-b.shape[1] // block))
    parts = zip(a.split(block, dim=1), b.split(block, dim=1), a_scales.unbind(1), b_scales.unbind(1), strict=True)
    for left, right, left_scale, right_scale in parts:
        total.add_(_fp32_mm(left, right.t()).mul_(left_scale[:, None]).mul_(right_scale))
    return total


def _spread(scales: Tensor, codes: Tensor, block: int) -> Tensor:
    """Scales [R, blocks] in a shape that broadcasts against the codes [R, K]."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(block, dim=1)[:, : codes.shape[1]]


def _are_powers_of_two(*scales: Tensor) -> bool:
    """Return whether scales, all of them normal numbers, are powers of two, by their mantissa bits."""
    return not any(bool((scale.view(torch.int32) & 0x007F_FFFF).any()) for scale in scales)


def _might_leave_range(*scales: Tensor) -> bool:
    """Return whether one scale after the other may leave FP32's range although both together stay inside.

    Nonzero sums of products lie between 2^-34 and 2^63, for any K that fits in memory; a scale within 2^±60 keeps them
    in the normal range.
    """
    return any(not (s.amin() >= 2.0**-60 and s.amax() <= 2.0**60) for s in scales if s.numel())


# One opaque operator: the precision setting around the GEMM must not be traced.
torch.library.define(
    "octavo::widened_mm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, ScalarType out_dtype, int block) -> Tensor",
)
torch.library.impl("octavo::widened_mm", "CPU")(_widened_mm)
torch.library.register_fake("octavo::widened_mm")(product_shape)
