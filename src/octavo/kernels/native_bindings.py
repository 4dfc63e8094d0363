"""Bindings of the native CPU kernels: what they support, and calls that pass tensors as addresses.

The C++ in native/ does not include torch, so one build serves every release of it. It is compiled once for each
instruction-set level; the best one of this processor is used, and every function here accepts another by name, so that
all of them can be compared. Codes and scales are those of :mod:`octavo.numerics`, bit for bit, but for the sign of a
NaN code, which is unspecified there. Where the extension could not be built, the same numbers come from torch's
operations, several times slower.

Threads are torch's own: as many as ``torch.set_num_threads`` allows, of the runtime it brought along; while the machine
is busy with other work they are octavo's (native/parallel.h).
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.backend import CastProblem, CastResult
from octavo.kernels.cores import quota_cores
from octavo.kernels.tracing import PLAIN_TENSORS, is_plain
from octavo.numerics import (
    CastSpec,
    Granularity,
    Measurement,
    Nonfinite,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    Rounding,
    ScaleRounding,
)
from octavo.numerics.cast_spec import LARGEST_MARGIN
from octavo.numerics.granularity import stacks
from octavo.numerics.quantized import stored_scale

_absence: str | None = None
if find_spec("octavo.kernels._native") is None:  # looks for the file only
    _absence = (
        "octavo's CPU kernels were not built here; with a C++ compiler, `pip install .` in a checkout builds them"
    )
else:
    try:
        import octavo.kernels._native as _native
    except ImportError as error:
        _absence = f"octavo's CPU kernels are here and cannot be loaded: {error}"
    else:
        if (_quota := quota_cores()) is not None:
            _native.limit_threads(_quota)

__all__ = [
    "CODES",
    "DTYPES",
    "address",
    "as_groups",
    "as_matrix",
    "block_of",
    "cast",
    "check_input",
    "codes_strides",
    "decodes",
    "dequantize",
    "element_number",
    "extension",
    "fake_quantize",
    "fresh",
    "in_memory",
    "is_transposed",
    "knows",
    "level_number",
    "levels",
    "names",
    "random_bits",
    "round_stochastic",
    "supports",
    "unsupported_reason",
    "why_absent",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of native/kernels.h
_INPUTS = (*DTYPES, torch.float64)  # dtypes that are cast; float64 as float32
_PER_TENSOR = PerTensor()
_FORMATS = (E4M3, E5M2)
CODES = (E4M3.torch_dtype, E5M2.torch_dtype)
_ELEMENTS = (*CODES, *DTYPES, torch.int8)  # in the order of native/kernels.h
_ROUNDINGS = tuple(ScaleRounding)
_LARGE = 4 << 20  # bytes


def levels() -> tuple[str, ...]:
    """The instruction-set levels that this build and this processor have, slowest first; none without the extension."""
    return () if _absence else tuple(_native.levels())


def why_absent() -> str | None:
    """Why there are no native kernels, or None."""
    return _absence


def extension() -> ModuleType:
    """The extension's functions, which check nothing.

    Raises:
        BackendError: it is not there.
    """
    if _absence is not None:
        raise BackendError(f"there are no native kernels: {_absence}")
    return _native


def unsupported_reason(problem: CastProblem) -> str | None:
    """Why :func:`cast` cannot run, as a clause; None when it can."""
    return next(_unsupported_reasons(problem), None)


def _unsupported_reasons(problem: CastProblem) -> Iterator[str]:
    if _absence is not None:
        yield f"there are no native kernels: {_absence}"
    if problem.device != "cpu":
        yield f"it runs on a CPU, and the tensor is on {problem.device}"
    if problem.format not in _FORMATS:
        yield f"its codes are E4M3 and E5M2, not {problem.format}"
    if problem.decodes and problem.dtype not in DTYPES:
        yield f"it decodes to float32, bfloat16 and float16, not {problem.dtype}"
    if problem.rounding != Rounding.NEAREST:
        yield "it rounds to nearest"
    if problem.foreign:
        yield "it makes octavo's scales, not another engine's"
    if 0 in problem.shape:
        yield "the tensor is empty"
    if not stacks(problem.granularity, problem.shape):
        yield f"a block of {problem.granularity} would hold rows of two matrices"
    if problem.transformed:
        yield "it reads memory, which torch.func's tensors do not have"


def supports(x: Tensor, fmt: Format, granularity: Granularity = _PER_TENSOR) -> bool:
    """Return whether :func:`cast` can cast ``x`` with scales of its own."""
    return unsupported_reason(CastProblem.of(x, fmt, granularity)) is None


def cast(
    x: Tensor,
    spec: CastSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measure_if_zero: bool = False,
    counting: bool = False,
    out: Tensor | None = None,
    level: str | None = None,
) -> CastResult:
    """Measure and cast in one call; memory is read once, or twice for one dynamic scale a tensor.

    Args:
        x: as :func:`supports` allows; float64 as float32.
        spec: how to cast.
        amax: float32 in the scale's shape, from which the scale is computed; None measures ``x``.
        scale: float32 in the scale's shape, used as it is.
        measure_if_zero: use the measured amax for a group whose passed amax is 0.
        counting: count saturated and underflowed elements, which takes several times as long.
        out: where to write the codes: in the format's dtype, shaped like ``x``, with the strides of
            :func:`codes_strides`; None makes a new tensor.
        level: an instruction-set level; None is the best.
    """
    fmt, granularity = spec.format, spec.granularity
    check_input(x, fmt, granularity, _INPUTS)
    _check_groups(amax, x, granularity)
    _check_groups(scale, x, granularity)
    if out is not None and not (_fits(out, fmt.torch_dtype, x.shape) and list(out.stride()) == codes_strides(x)):
        raise BackendError(
            f"codes of {_type(x)} go into {fmt.name} with strides {codes_strides(x)} on a CPU, not into {_layout(out)}"
        )
    matrix, transposed = as_matrix(x, granularity)
    codes = fresh(matrix.shape, fmt.torch_dtype) if out is None else out
    scales, amaxes, (nonfinite, *clipped) = _cast(
        matrix, transposed, spec, amax=amax, scale=scale, measure_if_zero=measure_if_zero, counting=counting,
        level=level, codes=codes,
    )  # fmt: skip
    shape = granularity.scale_shape(x.shape)
    if transposed:
        scales, amaxes = scales.t(), amaxes.t()
        codes = codes.t() if out is None else codes
    output_scale = stored_scale(scales.reshape(shape), spec.scale_format)
    output = QuantizedTensor(codes.reshape(x.shape), output_scale, granularity, x.dtype)
    measurement = Measurement(amaxes.reshape(shape), _count(nonfinite) if nonfinite else None)
    return CastResult(output, None, measurement, *(map(_count, clipped) if counting else ()))


def _count(number: int) -> Tensor:
    return torch.tensor(number, device="cpu")


def fake_quantize(x: Tensor, spec: CastSpec, *, out: Tensor | None = None, level: str | None = None) -> Tensor:
    """Values of :func:`cast`'s codes, without the codes.

    Args:
        x: as :func:`supports` allows, float32, bfloat16 or float16.
        spec: how to cast.
        out: where to write: shaped like ``x``, in its dtype, or ``x`` itself; None makes a new tensor.
        level: an instruction-set level; None is the best.
    """
    check_input(x, spec.format, spec.granularity, DTYPES)
    if out is not None and (out.dtype, out.shape) != (x.dtype, x.shape):
        raise BackendError(f"the values of {_type(x)} go into a tensor like it, not into {_type(out)}")
    matrix, transposed = as_matrix(x, spec.granularity)
    in_place = out is not None and matrix.data_ptr() == x.data_ptr() and _has_layout_of(x, out)
    matrix = matrix if in_place else matrix.contiguous()  # the kernel writes values as it reads elements
    values = fresh(matrix.shape, x.dtype) if out is None or not in_place else out
    _cast(matrix, transposed, spec, level=level, values=values)
    if values is out:
        return out
    result = (values.t() if transposed else values).reshape(x.shape)
    return result if out is None else out.copy_(result)


def _has_layout_of(x: Tensor, out: Tensor) -> bool:
    """Return whether ``out`` is ``x``, or has its strides in other memory, without overlap."""
    if not _fits(out, x.dtype, x.shape) or x.stride() != out.stride():
        return False
    reach = 0  # of the dimensions so far, in elements
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return x.data_ptr() == out.data_ptr() or abs(x.data_ptr() - out.data_ptr()) >= (reach + 1) * x.itemsize


def round_stochastic(scaled: Tensor, random: Tensor, fmt: Format, *, level: str | None = None) -> Tensor:
    """Codes of numbers, rounded up in magnitude where the dropped fraction and a random one together make 1.

    Args:
        scaled: float32, finite ones within ±maximum.
        random: integers from 0 to 2²⁰ - 1, shaped like ``scaled``.
        fmt: E4M3 or E5M2.
        level: an instruction-set level; None is the best.
    """
    check_input(scaled, fmt, PerTensor(), (torch.float32,))
    x, draws = in_memory(scaled).contiguous(), in_memory(random.to(torch.int32)).contiguous()
    if draws.shape != x.shape:
        raise BackendError(f"{_type(x)} and random {tuple(draws.shape)} do not go together; give one for each")
    codes = fresh(x.shape, fmt.torch_dtype)
    _native.round_stochastic(
        level_number(level), x.data_ptr(), draws.data_ptr(), x.numel(), _FORMATS.index(fmt), codes.data_ptr()
    )
    return codes


def random_bits(seed: Tensor, count: int, *, level: str | None = None) -> Tensor:
    """int32 [count]: the bits that :mod:`octavo.numerics.random_bits` defines for ``seed``, an int64 []."""
    out = fresh((count,), torch.int32)
    _native.random_bits(level_number(level), int(seed) & 0xFFFF_FFFF_FFFF_FFFF, count, out.data_ptr())
    return out


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
    if not decodes(codes, out_dtype, granularity):
        raise BackendError(
            f"the kernels decode E4M3 and E5M2, no empty tensor, to float32, bfloat16 or float16, not {_type(codes)} "
            f"{granularity} to {out_dtype}"
        )
    if out is not None and not (_fits(out, out_dtype, codes.shape) and out.is_contiguous()):
        raise BackendError(f"{_type(codes)} is decoded into a contiguous {out_dtype} like it, not into {_layout(out)}")
    matrix, transposed = as_matrix(codes, granularity, may_transpose=out is None)
    _check_groups(scale, codes, granularity)
    rows, columns = matrix.shape
    block_rows, block_columns = block_of(granularity, rows, columns, transposed=transposed)
    groups = (-(-rows // block_rows), -(-columns // block_columns))
    scales = as_groups(scale, groups, transposed=transposed)
    result = fresh((rows, columns), out_dtype) if out is None else out
    _native.dequantize(
        level_number(level),
        matrix.data_ptr(),
        CODES.index(codes.dtype),
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
    """Return whether :func:`dequantize` can decode these codes to ``dtype``."""
    supported = not _absence and knows(codes.dtype) and dtype in DTYPES
    return supported and codes.numel() > 0 and stacks(granularity, codes.shape)


def knows(*dtypes: torch.dtype) -> bool:
    """Return whether these are dtypes of codes that the kernels read."""
    return set(dtypes) <= set(CODES)


def element_number(dtype: torch.dtype) -> int:
    """The kernels' number for a dtype that they support."""
    return _ELEMENTS.index(dtype)


def _cast(
    matrix: Tensor,
    transposed: bool,
    spec: CastSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measure_if_zero: bool = False,
    counting: bool = False,
    level: str | None = None,
    codes: Tensor | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Scales and amaxes [groups down, groups across], and counts; writes ``codes`` or ``values``."""
    rows, columns = matrix.shape
    block_rows, block_columns = block_of(spec.granularity, rows, columns, transposed=transposed)
    groups = (-(-rows // block_rows), -(-columns // block_columns))
    amaxes = fresh(groups, torch.float32)
    given_amaxes = None if amax is None else as_groups(amax, groups, transposed=transposed)
    given_scales = None if scale is None else as_groups(scale, groups, transposed=transposed)
    scales = fresh(groups, torch.float32) if given_scales is None else given_scales
    counts = _native.quantize(
        level_number(level),
        *(matrix.data_ptr(), DTYPES.index(matrix.dtype), rows, columns, matrix.stride(0)),
        *(_FORMATS.index(spec.format), block_rows, block_columns, spec.nonfinite == Nonfinite.PROPAGATE),
        *(_ROUNDINGS.index(spec.scale_rounding), spec.amax_floor, int(min(spec.margin, LARGEST_MARGIN))),
        *(address(given_amaxes), measure_if_zero),
        *(address(given_scales), address(codes), address(values)),
        scales.data_ptr() if given_scales is None else 0,
        amaxes.data_ptr(),
        counting,
    )
    return scales, amaxes, counts


def codes_strides(x: Tensor) -> list[int]:
    """Strides of the codes of ``x``: a matrix whose rows lie side by side keeps its order, the rest is contiguous."""
    if is_transposed(x):
        return [1, x.shape[0]]
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: x.ndim]


def as_matrix(x: Tensor, granularity: Granularity, *, may_transpose: bool = True) -> tuple[Tensor, bool]:
    """``x`` as a matrix whose columns lie side by side, and whether it is the transpose of ``x``."""
    x = in_memory(x.float() if x.dtype is torch.float64 else x)
    if may_transpose and is_transposed(x):
        return x.t(), True
    if x.ndim != 2:
        x = x.reshape(1, -1) if isinstance(granularity, PerTensor) else x.reshape(-1, x.shape[-1])
    return (x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()), False


def is_transposed(x: Tensor) -> bool:
    """Return whether columns lie side by side instead of rows: a transposed view."""
    return x.ndim == 2 and x.stride(0) == 1 and x.shape[1] > 1 and x.stride(1) > 1


def block_of(granularity: Granularity, rows: int, columns: int, *, transposed: bool) -> tuple[int, int]:
    """Rows and columns of a group of the matrix that is worked on."""
    if isinstance(granularity, PerRow):
        return (rows, 1) if transposed else (1, columns)
    if isinstance(granularity, PerBlock):
        block = (granularity.rows, granularity.columns)
        down, across = (block[1], block[0]) if transposed else block
        return min(down, rows), min(across, columns)
    return rows, columns


def as_groups(values: Tensor, groups: Sequence[int], *, transposed: bool) -> Tensor:
    """Scales or amaxes in the order the kernels read them."""
    values = values.t() if transposed and values.ndim == 2 else values
    return in_memory(values.float()).reshape(tuple(groups)).contiguous()


def check_input(x: Tensor, fmt: Format, granularity: Granularity, dtypes: Sequence[torch.dtype]) -> None:
    """Check what the kernels rely on: operators can be called by name, past every other check."""
    if x.dtype not in dtypes or fmt not in _FORMATS or not x.numel() or not stacks(granularity, x.shape):
        description = f"{_type(x)} {granularity} to {fmt.name}"
        raise BackendError(f"the kernels cast {names(dtypes)}, no empty tensor, to E4M3 or E5M2, not {description}")


def _check_groups(values: Tensor | None, x: Tensor, granularity: Granularity) -> None:
    if values is not None and values.shape != granularity.scale_shape(x.shape):
        raise BackendError(
            f"{granularity} of {_type(x)} has one number for each of {tuple(granularity.scale_shape(x.shape))} groups, "
            f"not {tuple(values.shape)}"
        )


def names(dtypes: Sequence[torch.dtype]) -> str:
    """Names of dtypes, separated by commas."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _type(x: Tensor) -> str:
    """A tensor's dtype and shape, for messages."""
    return f"{names([x.dtype])} {tuple(x.shape)}"


def _layout(x: Tensor) -> str:
    layout = list(x.stride()) if x.layout is torch.strided else x.layout
    return f"{_type(x)}, {layout} on {x.device}{' with a negative bit' if x.is_neg() else ''}"


def _fits(out: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Return whether ``out`` is a plain CPU tensor of this dtype and shape whose memory holds its values."""
    plain = is_plain(out) and out.layout is torch.strided and out.device.type == "cpu"
    return plain and (out.dtype, out.shape) == (dtype, shape) and not (out.is_neg() or out._is_zerotensor())  # noqa: SLF001


def in_memory(x: Tensor) -> Tensor:
    """``x`` detached, with every value materialized in memory.

    Torch may set a bit instead of negating, and represent zeros without any memory.

    Raises:
        BackendError: a tensor that has no strides, or no memory of its own, such as a sparse one.
    """
    x = x.detach()
    if not is_plain(x) or x.layout is not torch.strided or x.device.type != "cpu":
        inside = " inside torch.func" if type(x) in PLAIN_TENSORS and not is_plain(x) else ""
        raise BackendError(
            f"the kernels read plain tensors on a CPU, not {type(x).__name__} {x.layout} on {x.device}{inside}"
        )
    return x.clone() if x._is_zerotensor() else x.resolve_neg()  # noqa: SLF001


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate memory that will be written as a whole; in large pages from 4 MiB, which is 3 to 4 times as fast.

    Exception: a virtual machine that reports free pages to its host waits for large ones after a pause.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if tensor.nbytes >= _LARGE:
        _native.expect_writes(tensor.data_ptr(), tensor.nbytes)
    return tensor


def address(tensor: Tensor | None) -> int:
    """Address of a tensor's first element, 0 for None; the tensor must outlive its use."""
    return 0 if tensor is None else tensor.data_ptr()


def level_number(name: str | None) -> int:
    """The kernels' number for an instruction-set level; None is the best.

    Raises:
        BackendError: this build or this processor does not have it.
    """
    if name is None:
        return -1
    available = levels()
    if name not in available:
        raise BackendError(f"there is no level {name!r} here; use one of {', '.join(available) or 'none'}")
    return available.index(name)
