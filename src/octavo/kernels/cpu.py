"""The native CPU kernels, as Python sees them: what they can do, and calls with addresses instead of tensors.

The C++ in native/ knows nothing of torch, so one build serves every release of it. It is compiled once for each
instruction-set level; the best one this processor has is taken, and every function here takes another by name, so that
all of them can be compared. Codes and scales are those of :mod:`octavo.numerics`, bit for bit. Where the extension
could not be built, the same numbers come from torch's operations, several times slower.

Threads are torch's own: as many as ``torch.set_num_threads`` allows, of the runtime it brought along.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import E4M3, E5M2, Format
from octavo.numerics import Accumulate, Granularity, Nonfinite, PerBlock, PerRow, PerTensor, ScaleRounding
from octavo.numerics.accumulate import CHAIN
from octavo.numerics.granularity import stacks

_absence: str | None = None
try:
    from octavo.kernels import _native
except ImportError as error:  # not built, or not for this interpreter
    _absence = str(error)

__all__ = [
    "DTYPES",
    "Cast",
    "ScaleRule",
    "codes_strides",
    "decodes",
    "dequantize",
    "element_number",
    "fake_quantize",
    "gemm",
    "hopper_sums",
    "is_traced",
    "knows",
    "level_number",
    "levels",
    "quantize",
    "round_stochastic",
    "supports",
    "threads",
    "why_absent",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of native/kernels.h
_FORMATS = (E4M3, E5M2)
_ELEMENTS = (E4M3.torch_dtype, E5M2.torch_dtype, *DTYPES)
_ROUNDINGS = tuple(ScaleRounding)
_LARGE = 4 << 20  # bytes
_NO_LARGER_MARGIN = 4096  # binades: below what FP64 holds
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How amaxes become scales; the fields are those of :func:`octavo.numerics.encode_scale_from_amax`."""

    rounding: ScaleRounding
    amax_floor: float
    margin: int


@dataclass(frozen=True, slots=True)
class Cast:
    """What a cast gives.

    Attributes:
        codes: in the format's dtype, shaped like the input.
        scale: float32, in the granularity's shape.
        amax: float32, largest finite magnitude of every group, in the same shape.
        nonfinite: number of NaN and ±Inf elements.
        saturated: finite elements beyond the format's maximum after scaling; 0 if not counted.
        underflowed: nonzero elements whose code is zero; 0 if not counted.
    """

    codes: Tensor
    scale: Tensor
    amax: Tensor
    nonfinite: int
    saturated: int
    underflowed: int


def levels() -> tuple[str, ...]:
    """The instruction-set levels that this build and this processor have, slowest first; none without the extension."""
    return () if _absence else tuple(_native.levels())


def why_absent() -> str | None:
    """Why there are no native kernels, or None."""
    return _absence


def threads() -> int:
    """How many threads the kernels use for large tensors, 1 without torch's OpenMP runtime; 0 without the extension."""
    return 0 if _absence else _native.max_threads()


def supports(x: Tensor, fmt: Format, granularity: Granularity | None = None) -> bool:
    """Whether :func:`quantize` can cast ``x``; without a granularity, whether a cast with given scales can."""
    known = not _absence and x.device.type == "cpu" and fmt in _FORMATS and x.numel() > 0
    if not known or (granularity is not None and not stacks(granularity, x.shape)):
        return False
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is None  # noqa: SLF001 (torch.func's tensors have no memory)


def quantize(
    x: Tensor,
    fmt: Format,
    granularity: Granularity,
    rule: ScaleRule,
    *,
    nonfinite: Nonfinite = Nonfinite.PROPAGATE,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    zero_is_unknown: bool = False,
    counting: bool = False,
    out: Tensor | None = None,
    level: str | None = None,
) -> Cast:
    """Measure and cast in one call; memory is read once, or twice for one dynamic scale a tensor.

    Args:
        x: as :func:`supports` allows; float64 as float32.
        fmt: E4M3 or E5M2.
        granularity: the scaling groups.
        rule: how amaxes become scales.
        nonfinite: what an infinite element becomes.
        amax: float32 in the scale's shape, to provide for instead of what is measured.
        scale: float32 in the scale's shape, used as it is.
        zero_is_unknown: whether a group whose given amax is 0 provides for what is measured in it.
        counting: count saturated and underflowed elements, which takes several times as long.
        out: where to write the codes: in the format's dtype, shaped like ``x``, with the strides of
            :func:`codes_strides`; None makes a new tensor.
        level: an instruction-set level; None is the best.
    """
    matrix, transposed = _as_matrix(x.detach(), granularity)
    codes = _fresh(matrix.shape, fmt.torch_dtype) if out is None else out
    given = _Given(nonfinite == Nonfinite.PROPAGATE, amax, scale, zero_is_unknown, counting)
    made, measured, counts = _quantize(
        matrix, transposed, fmt, granularity, rule, given=given, level=level, codes=codes
    )
    shape = granularity.scale_shape(x.shape)
    if transposed:
        made, measured = made.t(), measured.t()
        codes = codes.t() if out is None else codes
    return Cast(codes.reshape(x.shape), made.reshape(shape), measured.reshape(shape), *counts)


def fake_quantize(
    x: Tensor,
    fmt: Format,
    granularity: Granularity,
    rule: ScaleRule,
    *,
    out: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """The values of :func:`quantize`'s codes, without the codes.

    Args:
        x: as :func:`supports` allows, float32, bfloat16 or float16.
        fmt: E4M3 or E5M2.
        granularity: the scaling groups.
        rule: how amaxes become scales.
        out: where to write: shaped like ``x``, in its dtype, or ``x`` itself; None makes a new tensor.
        level: an instruction-set level; None is the best.
    """
    matrix, transposed = _as_matrix(x.detach(), granularity)
    in_place = out is not None and _same_layout(x, out) and matrix.data_ptr() == x.data_ptr()
    matrix = matrix if in_place else matrix.contiguous()  # the kernel writes values as it reads elements
    values = _fresh(matrix.shape, x.dtype) if out is None or not in_place else out
    _quantize(matrix, transposed, fmt, granularity, rule, level=level, values=values)
    if values is out:
        return out
    result = (values.t() if transposed else values).reshape(x.shape)
    return result if out is None else out.copy_(result)


def _same_layout(x: Tensor, out: Tensor) -> bool:
    """Whether ``out`` is ``x``, or lies in other memory as ``x`` does, no element twice."""
    if x.stride() != out.stride() or any(s == 0 and n > 1 for s, n in zip(out.stride(), out.shape, strict=True)):
        return False
    return x.data_ptr() == out.data_ptr() or x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def round_stochastic(scaled: Tensor, random: Tensor, fmt: Format, *, level: str | None = None) -> Tensor:
    """Codes of numbers, rounded up in magnitude where the dropped fraction and a random one together make 1.

    Args:
        scaled: float32, finite ones within ±maximum.
        random: integers from 0 to 2²⁰ - 1, shaped like ``scaled``.
        fmt: E4M3 or E5M2.
        level: an instruction-set level; None is the best.
    """
    x, drawn = scaled.detach().contiguous(), random.to(torch.int32).contiguous()
    if drawn.shape != x.shape or x.dtype is not torch.float32:
        raise BackendError(f"{x.dtype} {tuple(x.shape)} and random {tuple(drawn.shape)} do not go together")
    codes = _fresh(x.shape, fmt.torch_dtype)
    _native.round_stochastic(
        level_number(level), x.data_ptr(), drawn.data_ptr(), x.numel(), _FORMATS.index(fmt), codes.data_ptr()
    )
    return codes


def dequantize(
    codes: Tensor,
    scale: Tensor,
    granularity: Granularity,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """``fp32(codes) · scale``, rounded once to ``out_dtype``.

    Args:
        codes: E4M3 or E5M2, on a CPU.
        scale: float32, in the granularity's shape.
        granularity: the scaling groups.
        out_dtype: float32, bfloat16 or float16.
        out: where to write, contiguous and shaped like ``codes``; None makes a new tensor.
        level: an instruction-set level; None is the best.
    """
    matrix, transposed = _as_matrix(codes, granularity, may_transpose=out is None)
    rows, columns = matrix.shape
    block_rows, block_columns = _block(granularity, rows, columns, transposed=transposed)
    groups = (-(-rows // block_rows), -(-columns // block_columns))
    scales = _as_groups(scale, groups, transposed=transposed)
    result = _fresh((rows, columns), out_dtype) if out is None else out
    _native.dequantize(
        level_number(level),
        matrix.data_ptr(),
        _FORMATS.index(_format_of(codes)),
        rows,
        columns,
        matrix.stride(0),
        block_rows,
        block_columns,
        scales.data_ptr(),
        result.data_ptr(),
        DTYPES.index(out_dtype),
    )
    return out if out is not None else (result.t() if transposed else result).reshape(codes.shape)


def decodes(codes: Tensor, dtype: torch.dtype, granularity: Granularity) -> bool:
    """Whether :func:`dequantize` can decode these codes to ``dtype``."""
    known = not _absence and knows(codes.dtype) and dtype in DTYPES
    return known and codes.numel() > 0 and stacks(granularity, codes.shape)


def knows(*dtypes: torch.dtype) -> bool:
    """Whether these are dtypes of codes that the kernels read."""
    return set(dtypes) <= {fmt.torch_dtype for fmt in _FORMATS}


def element_number(dtype: torch.dtype) -> int:
    """The number the kernels know a dtype by, one of theirs."""
    return _ELEMENTS.index(dtype)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    block: int = 0,
    level: str | None = None,
) -> Tensor:
    """``(a @ b.T) · scales + bias``: products summed in FP32, scaled, rounded once.

    With few rows of ``a``, the codes of ``b`` are read once, in the order of memory.

    Args:
        a: [M, K], E4M3 or E5M2 codes, or float32, bfloat16 or float16; nothing is empty.
        b: [N, K], any of these too.
        a_scale: float32 [M or 1, blocks of K or 1]; None is 1.
        b_scale: float32 [N or 1, blocks of K or 1]; None is 1.
        out_dtype: float32, bfloat16 or float16.
        bias: [N] or None; added in FP32.
        block: columns of K that share a scale, 0 if all do; the sums of a block are scaled before they are added.
        level: an instruction-set level; None is the best.
    """
    (m, k), n = a.shape, b.shape[0]
    _check_shapes(a, b, a_scale, b_scale, bias)
    blocks = -(-k // block) if block else 1
    out = _fresh((m, n), out_dtype)
    left, right = (_dense_one_way(matrix) for matrix in (a, b))
    one = torch.ones(1, 1)
    a_scales, b_scales = (
        (one if scale is None else scale.detach()).expand(-1, blocks).contiguous() for scale in (a_scale, b_scale)
    )
    added = None if bias is None else bias.detach().float().contiguous()
    _native.gemm(
        level_number(level),
        *_operand(left, a_scales),
        *_operand(right, b_scales),
        m,
        n,
        k,
        block,
        _address(added),
        out.data_ptr(),
        DTYPES.index(out_dtype),
    )
    return out


def hopper_sums(
    a: Tensor,
    b: Tensor,
    *,
    accumulate: Accumulate,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """The sums of ``a @ b.T`` as Hopper's tensor cores make them: :func:`octavo.numerics.hopper_sums`, to the bit.

    Args:
        a: codes [M, K], E4M3 or E5M2.
        b: codes [N, K].
        accumulate: ``hopper-fast`` or ``hopper-slow``.
        a_scale: float32 [M or 1, chains or 1]; each chain of ``hopper-slow`` is multiplied by this and by ``b_scale``
            in FP64, rounded once, then added. None, in both, leaves the sums as they are.
        b_scale: float32 [N or 1, chains or 1], or None.
        level: an instruction-set level; None is the best.
    """
    (m, k), n = a.shape, b.shape[0]
    out = torch.zeros(m, n)
    left, right = (_dense_one_way(codes) for codes in (a, b))
    chains = -(-k // CHAIN)
    a_scales, b_scales = (
        None if scale is None else scale.detach().expand(-1, chains).contiguous() for scale in (a_scale, b_scale)
    )
    _native.hopper(
        level_number(level),
        *_operand(left, a_scales),
        *_operand(right, b_scales),
        m,
        n,
        k,
        accumulate is Accumulate.HOPPER_FAST,
        out.data_ptr(),
    )
    return out


class _Given(NamedTuple):
    """What :func:`quantize` may be told; its arguments say what each is."""

    propagate: bool = True
    amax: Tensor | None = None
    scale: Tensor | None = None
    zero_is_unknown: bool = False
    counting: bool = False


def _quantize(
    matrix: Tensor,
    transposed: bool,
    fmt: Format,
    granularity: Granularity,
    rule: ScaleRule,
    *,
    given: _Given | None = None,
    level: str | None = None,
    codes: Tensor | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Scales, amaxes and counts; codes, or the values of codes, are written where they are wanted."""
    given = given or _Given()
    rows, columns = matrix.shape
    block_rows, block_columns = _block(granularity, rows, columns, transposed=transposed)
    groups = (-(-rows // block_rows), -(-columns // block_columns))
    measured = torch.empty(groups)
    amax, scale = (t if t is None else _as_groups(t, groups, transposed=transposed) for t in (given.amax, given.scale))
    made = torch.empty(groups) if scale is None else scale
    counts = _native.quantize(
        level_number(level),
        *(matrix.data_ptr(), DTYPES.index(matrix.dtype), rows, columns, matrix.stride(0)),
        *(_FORMATS.index(fmt), block_rows, block_columns, given.propagate),
        *(_ROUNDINGS.index(rule.rounding), rule.amax_floor, int(min(rule.margin, _NO_LARGER_MARGIN))),
        *(_address(amax), given.zero_is_unknown),
        *(_address(scale), _address(codes), _address(values)),
        _address(None if scale is made else made),
        measured.data_ptr(),
        given.counting,
    )
    return made, measured, counts


def _operand(matrix: Tensor, scale: Tensor | None) -> tuple[int, int, int, int, int, bool]:
    """A GEMM's operand as the kernels take it; both tensors must outlive the call."""
    layout = (matrix.data_ptr(), element_number(matrix.dtype), matrix.stride(0), matrix.stride(1))
    return (*layout, _address(scale), scale is not None and scale.shape[0] > 1)


def _check_shapes(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None) -> None:
    """A kernel reads what it was told is there; operators can be called by name, past every other check."""
    rows_fit = all(s is None or s.shape[0] in (1, x.shape[0]) for x, s in ((a, a_scale), (b, b_scale)))
    if a.shape[1] != b.shape[1] or not rows_fit or (bias is not None and bias.numel() != b.shape[0]):
        shapes = [None if t is None else tuple(t.shape) for t in (a, b, a_scale, b_scale, bias)]
        raise BackendError(f"a, b, their scales and the bias do not go together: {shapes}; K and the rows must agree")


def _dense_one_way(matrix: Tensor) -> Tensor:
    """A matrix whose rows or columns lie side by side."""
    return matrix.detach() if 1 in matrix.stride() else matrix.detach().contiguous()


def is_traced(x: Tensor) -> bool:
    """Whether ``x`` is a stand-in, or its operations are watched: then it has no address, and operators are called."""
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001
    return watched or type(x) not in _PLAIN_TENSORS


def codes_strides(x: Tensor) -> list[int]:
    """Strides of the codes of ``x``: a matrix whose rows lie side by side keeps its order, the rest is contiguous."""
    if _is_transposed(x):
        return [1, x.shape[0]]
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: x.ndim]


def _as_matrix(x: Tensor, granularity: Granularity, *, may_transpose: bool = True) -> tuple[Tensor, bool]:
    """``x`` as a matrix whose columns lie side by side, and whether it is the transpose of ``x``."""
    x = x.float() if x.dtype is torch.float64 else x
    if may_transpose and _is_transposed(x):
        return x.t(), True
    if x.ndim != 2:
        x = x.reshape(1, -1) if isinstance(granularity, PerTensor) else x.reshape(-1, x.shape[-1])
    return (x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()), False


def _is_transposed(x: Tensor) -> bool:
    return x.ndim == 2 and x.stride(0) == 1 and x.shape[1] > 1 and x.stride(1) > 1


def _block(granularity: Granularity, rows: int, columns: int, *, transposed: bool) -> tuple[int, int]:
    """Rows and columns of a group of the matrix that is worked on."""
    if isinstance(granularity, PerRow):
        return (rows, 1) if transposed else (1, columns)
    if isinstance(granularity, PerBlock):
        block = (granularity.rows, granularity.columns)
        return (block[1], block[0]) if transposed else block
    return rows, columns


def _as_groups(values: Tensor, groups: Sequence[int], *, transposed: bool) -> Tensor:
    """Scales or amaxes in the order the kernels read them."""
    values = values.t() if transposed and values.ndim == 2 else values
    return values.detach().float().reshape(tuple(groups)).contiguous()


def _fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that will be written as a whole: in large pages, where it is large, which is 3 to 4 times as fast.

    With one exception: a virtual machine that reports free pages to its host waits for large ones after a pause.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if tensor.nbytes >= _LARGE:
        _native.expect_writes(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _format_of(codes: Tensor) -> Format:
    return E4M3 if codes.dtype is E4M3.torch_dtype else E5M2


def level_number(name: str | None) -> int:
    """The number the kernels know an instruction-set level by; None is the best.

    Raises:
        BackendError: this build or this processor does not have it.
    """
    known = levels()
    if name is not None and name not in known:
        raise BackendError(f"there is no level {name!r} here; use one of {', '.join(known) or 'none'}")
    return -1 if name is None else known.index(name)
