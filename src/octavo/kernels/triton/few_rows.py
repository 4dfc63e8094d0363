"""FP8 weights times few rows: y = x @ w.T at the speed at which the weights can be read.

| tensor | shape and dtype                                                                     |
|--------|-------------------------------------------------------------------------------------|
| x      | [R, K] bfloat16 or float32, R from 1 to 64                                          |
| w      | [N, K] E4M3 codes, one float32 scale a row or one for all; gated: [2N, K], see below |
| y      | [R, N] float32 or bfloat16                                                          |

Each code is read once, 16 bytes at a time, and nothing else is large. Bytes of a product: N·K, which is the minimum,
and 4·N of scales. The rows of x come from the second-level cache: for one row 4·K bytes a program, of 2 to 8 rows of
weights, each with its gate's if there is one; for R rows 2·R·K bytes a program, of 16 to 64 rows of weights.

- One row: a program sums elementwise products in FP32 over all of K, its warps side by side along K, so that no sum has
  to be finished by another kernel. A norm is free: x · norm weight is
  multiplied, and the factor 1 / rms, for which every program sees all of x, meets the sums.
- More rows: codes are widened to bfloat16, which is exact, and multiplied by tensor cores with FP32 sums; K is dealt
  out to the warps, whose sums are added in a fixed order. bfloat16 rows are taken as they are. float32 rows are the sum
  of two bfloat16 numbers, 2^-16 of x aside, each of which is multiplied.

Numbers do not depend on what else runs: there are no atomics. A row's result does depend on whether it is alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import E4M3
from octavo.kernels.triton import launching
from octavo.kernels.triton.codes import INTERPRETED, has_hardware_casts, number_from_code, round_to
from octavo.numerics import PerRow, PerTensor, QuantizedTensor

__all__ = ["FEW", "few_rows", "multiply_wide", "rms_norm"]

FEW = 64  # rows; of more a tensor core can make use
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def multiply_exact(a, b, sums):
    """``sums + a @ b`` of bfloat16 operands; the interpreter cannot multiply them as they are."""
    if _INTERPRETED:
        sums += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        sums = tl.dot(a, b, sums)
    return sums


@triton.jit
def multiply_wide(a, b, sums):
    """``sums + a @ b``, one of which may be FP32 and is taken in two parts; the other holds bfloat16 numbers."""
    if a.dtype == tl.float32 and b.dtype == tl.float32:
        sums += tl.dot(a, b, input_precision="ieee")
    elif a.dtype == tl.float32:
        high = round_to(a, tl.bfloat16)
        sums = multiply_exact(round_to(a - high.to(tl.float32), tl.bfloat16), b, multiply_exact(high, b, sums))
    elif b.dtype == tl.float32:
        high = round_to(b, tl.bfloat16)
        sums = multiply_exact(a, round_to(b - high.to(tl.float32), tl.bfloat16), multiply_exact(a, high, sums))
    else:
        sums = multiply_exact(a, b, sums)
    return sums


@triton.jit
def _silu(x):
    small = tl.exp(-tl.abs(x))  # never above 1
    return x * tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _scales_of(scale, row, N, PER_ROW: tl.constexpr):
    return tl.load(scale + (row if PER_ROW else row * 0), mask=row < N, other=0.0)


@triton.jit
def _products(held, own, HARDWARE: tl.constexpr):
    """Codes [ROWS, WIDTH] times x, sixteen neighbours, which one thread holds, added up."""
    values = number_from_code(held, 3, HARDWARE) * own[None, :]
    return tl.sum(tl.reshape(values, [held.shape[0], held.shape[1] // 16, 16]), axis=2)


@triton.jit
def one_row_kernel(
    x, norm, codes, scale, bias, residual, out, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < N)[:, None]
    at = codes + row.to(tl.int64)[:, None] * K + column[None, :]
    other = at + tl.cast(N, tl.int64) * K  # the other half of a gated weight
    sums = tl.zeros([ROWS, WIDTH // 16], tl.float32)
    sums_other = tl.zeros([ROWS, WIDTH // 16], tl.float32)
    squares = tl.zeros([WIDTH // 16], tl.float32)
    for first in range(0, K, WIDTH):
        left = first + column < K
        held = tl.load(at + first, mask=inside & left[None, :], other=0, eviction_policy="evict_first")
        if GATED:
            held_other = tl.load(other + first, mask=inside & left[None, :], other=0, eviction_policy="evict_first")
        own = tl.load(x + first + column, mask=left, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(own * own, [WIDTH // 16, 16]), axis=1)
            own *= tl.load(norm + first + column, mask=left, other=0.0)
        sums += _products(held, own, HARDWARE)
        if GATED:
            sums_other += _products(held_other, own, HARDWARE)
    factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps) if NORM else 1.0
    y = tl.sum(sums, axis=1) * factor * _scales_of(scale, row, N, PER_ROW)
    if GATED:
        y = _silu(y) * (tl.sum(sums_other, axis=1) * factor * _scales_of(scale + N * PER_ROW, row, N, PER_ROW))
    if BIAS:
        y += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(out + row, round_to(y, out.dtype.element_ty), mask=row < N)


@triton.jit
def _widened(codes, HARDWARE: tl.constexpr):
    return number_from_code(codes, 3, HARDWARE).to(tl.bfloat16)


@triton.jit
def some_rows_kernel(
    x, codes, scale, bias, residual, out, R, N, K,
    GATED: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    r, n = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, SLICES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = codes + n.to(tl.int64)[None, :, None] * K + k[:, None, :]  # [SLICES, OUTPUTS, WIDTH]
    other = at + tl.cast(N, tl.int64) * K
    rows = x + r[None, None, :] * K + k[:, :, None]  # [SLICES, WIDTH, ROWS]
    n_inside, r_inside = (n < N)[None, :, None], (r < R)[None, None, :]
    sums = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    sums_other = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    for first in range(0, K, SLICES * WIDTH):
        held = tl.load(at + first, mask=n_inside & (first + k < K)[:, None, :], other=0)
        own = tl.load(rows + first, mask=r_inside & (first + k < K)[:, :, None], other=0.0)
        sums = multiply_wide(_widened(held, HARDWARE), own, sums)
        if GATED:
            held = tl.load(other + first, mask=n_inside & (first + k < K)[:, None, :], other=0)
            sums_other = multiply_wide(_widened(held, HARDWARE), own, sums_other)
    y = tl.sum(sums, axis=0) * _scales_of(scale, n, N, PER_ROW)[:, None]
    if GATED:
        y = _silu(y) * (tl.sum(sums_other, axis=0) * _scales_of(scale + N * PER_ROW, n, N, PER_ROW)[:, None])
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place, inside = r[None, :] * N + n[:, None], (r < R)[None, :] & (n < N)[:, None]
    if RESIDUAL:
        y += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, round_to(y, out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_kernel(x, norm, out, K, eps, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64) * K, tl.arange(0, WIDTH)
    own = tl.load(x + row + column, mask=column < K, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(own * own, axis=0) / K + eps)
    y = own * factor * tl.load(norm + column, mask=column < K, other=0.0)
    tl.store(out + row + column, round_to(y, tl.bfloat16), mask=column < K)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) · weight`` of rows, summed in FP32, rounded once to bfloat16.

    Reads 4 bytes and writes 2 for a number of float32 rows, the minimum.

    Args:
        x: [R, K] bfloat16 or float32, contiguous.
        weight: float32 [K].
        eps: added to the mean square.
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    width = launching.next_power_of_2(x.shape[1])
    launching.launch(
        rms_norm_kernel, (len(x),), x, weight, out, x.shape[1], eps, WIDTH=width, num_warps=4 if width <= 4096 else 8
    )
    return out


def few_rows(
    x: Tensor,
    weight: QuantizedTensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``y = x @ w.T · scale + bias + residual`` with FP32 sums, rounded once.

    Args:
        x: [R, K], contiguous, R from 1 to 64.
        weight: E4M3 codes [N, K] with a float32 scale a row or one for all.
        norm: float32 [K]; ``x / rms(x) · norm`` is multiplied instead of x, of more than one row in bfloat16.
        eps: of the norm.
        bias: [N].
        residual: [R, N].
        gated: the weight is that of two products, [2N, K], and y = silu(first) · second, plus bias and residual.
        out: where to write, contiguous; may be the residual, not x.
        out_dtype: float32 or bfloat16, where ``out`` is not given.

    Returns:
        [R, N]. NaN codes give NaN; so do infinite numbers in float32 rows, of which there is more than one.

    Raises:
        BackendError: more rows, or shapes and dtypes that do not go together.
    """
    if out is None and torch.compiler.is_compiling():
        traced: Tensor = torch.ops.octavo.few_rows(
            x, weight.data, weight.scale, norm, eps, bias, residual, gated, out_dtype
        )
        return traced
    _check(x, weight, gated=gated)
    rows, columns = weight.shape[0] // (1 + gated), x.shape[1]
    if out is None:
        out = torch.empty(len(x), rows, dtype=out_dtype, device=x.device)
    if len(x) > 1 and norm is not None:
        x, norm = rms_norm(x, norm, eps), None
    scale = weight.scale.view(-1)
    flags = {"GATED": gated, "PER_ROW": scale.numel() > 1, "BIAS": bias is not None, "RESIDUAL": residual is not None}
    flags["HARDWARE"] = has_hardware_casts(x.device)
    programs = 1 if INTERPRETED else launching.multiprocessors(x.device)
    operands = (weight.data.view(torch.uint8), scale, bias, residual, out)
    if len(x) == 1:
        each = _rows_each(rows, 8, 2, 2 * programs)
        width = min(2048, max(16, launching.next_power_of_2(columns)))
        launching.launch(
            one_row_kernel, (launching.ceil_div(rows, each),),
            x, norm, *operands, rows, columns, eps, NORM=norm is not None, **flags, ROWS=each, WIDTH=width, num_warps=4
        )  # fmt: skip
        return out
    padded = max(16, launching.next_power_of_2(len(x)))
    # Nearly one program a multiprocessor: half as many rows of weights would read the rows of x twice as often.
    each = _rows_each(rows, max(16, 1024 // padded // (1 + gated)), 16, programs * 9 // 10)
    launching.launch(
        some_rows_kernel, (launching.ceil_div(rows, each),),
        x, *operands, len(x), rows, columns, **flags,
        ROWS=padded, OUTPUTS=each, SLICES=4, WIDTH=128 if padded == 16 else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _rows_each(rows: int, most: int, least: int, programs: int) -> int:
    """As many rows of weights to a program as leave that many programs."""
    while most > least and rows < most * programs:
        most //= 2
    return most


def _check(x: Tensor, weight: QuantizedTensor, *, gated: bool) -> None:
    if x.ndim != 2 or not 1 <= len(x) <= FEW or not x.is_contiguous() or x.dtype not in (torch.bfloat16, torch.float32):
        raise BackendError(
            f"few_rows takes 1 to {FEW} contiguous rows of bfloat16 or float32, not {tuple(x.shape)} {x.dtype}"
        )
    shape, groups = weight.shape, weight.granularity
    fits = weight.data.dtype == E4M3.torch_dtype and weight.data.is_contiguous() and weight.scale.dtype == torch.float32
    if not fits or groups not in (PerRow(), PerTensor()) or shape[1] != x.shape[1] or (gated and shape[0] % 2):
        raise BackendError(
            f"few_rows of {tuple(x.shape)} needs contiguous E4M3 codes [N, {x.shape[1]}] with a float32 scale a row or "
            f"one for all, N even if gated, not {weight.data.dtype} {tuple(shape)} {groups}"
        )


def _operator(  # an operator's schema
    x: Tensor, codes: Tensor, scale: Tensor, norm: Tensor | None, eps: float, bias: Tensor | None,
    residual: Tensor | None, gated: bool, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight = QuantizedTensor(codes, scale, PerRow() if scale.ndim else PerTensor(), torch.float32)
    return few_rows(
        x, weight, norm=norm, eps=eps, bias=bias, residual=residual, gated=gated, out_dtype=out_dtype
    )  # fmt: skip


def _shape(x: Tensor, codes: Tensor, *options: object) -> Tensor:
    *_, gated, out_dtype = options
    assert isinstance(out_dtype, torch.dtype)
    return x.new_empty(x.shape[0], codes.shape[0] // (2 if gated else 1), dtype=out_dtype)


torch.library.define(
    "octavo::few_rows",
    "(Tensor x, Tensor codes, Tensor scale, Tensor? norm, float eps, Tensor? bias, Tensor? residual, bool gated, "
    "ScalarType out_dtype) -> Tensor",
)
torch.library.impl("octavo::few_rows", "CompositeExplicitAutograd")(_operator)
torch.library.register_fake("octavo::few_rows")(_shape)
