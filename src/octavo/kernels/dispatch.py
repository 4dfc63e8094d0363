"""Dispatch of casts and GEMMs: choose a backend for each, and keep the choice with the reasons against faster ones.

Backends are tried in order; the first that supports the problem runs. :func:`explain` chooses for any problem without
running it, and :func:`selections` and :func:`cast_selections` list the choices of eager calls; a traced graph chooses
while it is traced.

Whether a product is computed in FP8 at all is not decided here but by the recipe: see octavo/functional/linear.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, Unpack

import torch
from torch import Tensor

from octavo.errors import BackendError, ConfigError
from octavo.formats import format_of
from octavo.kernels.backend import (
    Backend,
    CastBackend,
    CastProblem,
    CastResult,
    MatmulProblem,
    ScaleSource,
    inside_transform,
)
from octavo.kernels.backends.native import NativeBackend, NativeCast
from octavo.kernels.backends.reference import ReferenceBackend, ReferenceCast
from octavo.kernels.backends.torch_cpu import CpuBackend
from octavo.kernels.backends.torch_cuda import CudaBackend
from octavo.kernels.backends.triton import TritonBackend, TritonCast
from octavo.kernels.hopper_model import HopperModelBackend
from octavo.kernels.row_by_row import is_row_by_row, rows_of
from octavo.kernels.tracing import is_distributed, is_plain, is_tracing
from octavo.numerics import Accumulate, AmaxRecord, CastSpec, Granularity, QuantizedTensor
from octavo.numerics import dequantize as dequantize_tensor
from octavo.numerics.cast import check_float

__all__ = [
    "BACKENDS",
    "CAST_BACKENDS",
    "Selection",
    "backend_of_cast",
    "cast",
    "cast_selections",
    "check_operands",
    "dequantize",
    "explain",
    "fake_quantize",
    "scaled_mm",
    "select_product",
    "selections",
]

BACKENDS: tuple[Backend, ...] = (
    CudaBackend(),
    TritonBackend(),
    NativeBackend(),
    CpuBackend(),
    HopperModelBackend(),
    ReferenceBackend(),
)  # fastest first
CAST_BACKENDS: tuple[CastBackend, ...] = (TritonCast(), NativeCast(), ReferenceCast())  # fastest first
_MOST_CHOICES = 1024
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ACCUMULATE = tuple(Accumulate)  # no graph traces a list of them, nor how one is made of its name


_Problem = TypeVar("_Problem", MatmulProblem, CastProblem)
_Backend = TypeVar("_Backend", Backend, CastBackend)


@dataclass(frozen=True, slots=True)
class Selection(Generic[_Problem]):
    """A problem, the backend that runs it, and why each faster one does not."""

    problem: _Problem
    backend: str
    rejected: tuple[tuple[str, str], ...]


_cast_choices: dict[tuple[object, ...], tuple[CastBackend, Selection[CastProblem]]] = {}
_gemm_choices: dict[tuple[object, ...], tuple[Backend, Selection[MatmulProblem]]] = {}


def cast(
    x: Tensor,
    spec: CastSpec,
    *,
    transpose: bool = False,
    record: AmaxRecord | None = None,
    **source: Unpack[ScaleSource],
) -> CastResult:
    """Cast by the fastest backend that supports the problem; arguments are not checked.

    Args:
        x: float16, bfloat16, float32 or float64, of a shape that ``spec.granularity`` allows.
        spec: how to cast.
        transpose: cast the transpose of the matrix ``x`` too. A GPU computes both from one reading, the codes of each
            contiguous, as its GEMM reads them. A CPU casts once where both have the same scaling groups, and the
            transpose is a view; otherwise it casts twice, and records once.
        record: buffers for what is measured; an empty ``x`` records nothing.
        source: amax or scale, if they are not to be measured.
    """
    selected = _select_cast(x, spec, source)
    result = selected.cast(x, spec, transpose=transpose, record=record, **source)
    if record is not None and result.measurement is not None and x.numel():
        record.add(result.measurement)
    if transpose and result.transposed is None:
        if spec.granularity.orientation_free:
            return result._replace(transposed=result.output.t())
        return result._replace(transposed=selected.cast(x.t(), spec, record=AmaxRecord(), **source).output)
    return result


def _select_cast(x: Tensor, spec: CastSpec, source: ScaleSource) -> CastBackend:
    scale_given = source.get("amax") is not None or source.get("scale") is not None
    if is_distributed(x):
        raise ConfigError(
            "a DTensor has no memory of its own to cast; pass x.full_tensor(), or x.to_local() for this rank's part"
        )
    if is_tracing() or not is_plain(x):  # a size may be a symbol, which is no key
        return _first_able(_describe_cast(x, spec, scale_given=scale_given), CAST_BACKENDS)[0]
    cast_as = (spec.format, spec.granularity, spec.rounding, spec.engine is not None)
    key = (x.shape, x.dtype, x.device, *cast_as, scale_given, inside_transform())
    entry = _cast_choices.get(key)
    if entry is None:
        entry = _choose_cast(key, _describe_cast(x, spec, scale_given=scale_given))
    return entry[0]


def backend_of_cast(x: Tensor, spec: CastSpec, source: ScaleSource) -> str:
    """Name of the backend that :func:`cast` selects; arguments as there."""
    return _select_cast(x, spec, source).name


def _choose_cast(key: tuple[object, ...], problem: CastProblem) -> tuple[CastBackend, Selection[CastProblem]]:
    entry = _select(problem, CAST_BACKENDS)
    if len(_cast_choices) < _MOST_CHOICES:
        _cast_choices[key] = entry
    return entry


def _describe_cast(x: Tensor, spec: CastSpec, *, scale_given: bool) -> CastProblem:
    return CastProblem(
        shape=x.shape,
        dtype=x.dtype,
        device=x.device.type,
        format=spec.format,
        granularity=spec.granularity,
        rounding=spec.rounding,
        scale_given=scale_given,
        transformed=inside_transform(),
        foreign=spec.engine is not None,
    )


def fake_quantize(x: Tensor, spec: CastSpec, *, out: Tensor | None = None) -> Tensor:
    """Values of the codes that :func:`cast` makes, by the same backend; arguments are not checked.

    Args:
        x: as in :func:`cast`.
        spec: how to cast.
        out: where to write, like ``x``, or ``x`` itself; None makes a new tensor.
    """
    selected = _select_cast(x, spec, {})
    values = selected.fake_quantize(x, spec, out=out)
    if values is None:
        values = dequantize_tensor(selected.cast(x, spec, record=AmaxRecord()).output)
        return values if out is None else out.copy_(values)
    if out is not None:
        torch.autograd.graph.increment_version(out)  # what was saved for a backward pass is no longer there
    return values


def dequantize(codes: Tensor, scale: Tensor, granularity: Granularity, out_dtype: torch.dtype) -> Tensor:
    """Decode by the fastest backend that supports it: ``fp32(codes) · scale``, rounded once to ``out_dtype``.

    Args:
        codes: an FP8 dtype, in memory: an operator's implementation calls this, past all tracing.
        scale: float32, in the granularity's shape.
        granularity: the scaling groups.
        out_dtype: of the values.
    """
    key = (codes.shape, codes.dtype, codes.device, granularity, out_dtype)
    entry = _cast_choices.get(key)
    if entry is None:
        problem = CastProblem(
            shape=codes.shape,
            dtype=out_dtype,
            device=codes.device.type,
            format=format_of(codes.dtype),
            granularity=granularity,
            decodes=True,
        )
        entry = _choose_cast(key, problem)
    return entry[0].dequantize(codes, scale, granularity, out_dtype)


def cast_selections() -> tuple[Selection[CastProblem], ...]:
    """The choices of casts and decodings in this process, oldest first; the first 1024 different problems."""
    return tuple(selection for _, selection in _cast_choices.values())


def scaled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    accumulate: Accumulate = Accumulate.FP32,
    fast_accumulation: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Multiply two quantized matrices.

        y = (a.data @ b.data.T) · a.scale · b.scale.T + bias

    The products are exact, the sums FP32, the scales applied to the sums; y is rounded once. With block scales the
    products of each block of K are summed, scaled and then added in FP32.

    Args:
        a: [M, K].
        b: [N, K].
        out_dtype: bfloat16, float16 or float32; None is ``a.hp_dtype``.
        bias: [N], added before the rounding.
        accumulate: "fp32"; or "hopper-fast" or "hopper-slow" for the sums of Hopper's tensor cores, which are made with
            and without fast accumulation: by the hardware where there is one, to the bit by a model elsewhere. On CUDA
            "fp32" is what cuBLAS calls so: the sums of tensor cores, promoted to FP32 on the way. With block scales
            that happens at the end of every block, as "hopper-slow" does at every 128 of K.
        fast_accumulation: with "fp32" on CUDA, let cuBLAS keep fewer bits while it sums; of no effect elsewhere.
        backend: a backend's name, or "auto" for the fastest that can.

    Returns:
        [M, N] of ``out_dtype``. A NaN or ±Inf code makes the outputs of its row or column NaN or ±Inf, as in any GEMM.

    Raises:
        ConfigError: operands that are not matrices, different K, a wrong bias or out_dtype.
        BackendError: the named backend, or any, cannot run this problem, or does not exist.

    Example:
        >>> import octavo
        >>> x, w = torch.eye(2), torch.tensor([[1.0, 2.0], [0.5, 4.0]])
        >>> octavo.scaled_mm(octavo.quantize(x, octavo.E4M3), octavo.quantize(w, octavo.E4M3))
        tensor([[1.0000, 0.5000],
                [2.0000, 4.0000]])
    """
    if backend != "auto" or is_tracing():
        problem = _describe(a, b, out_dtype, bias, accumulate, fast_accumulation=fast_accumulation)
        selected = _first_able(problem, BACKENDS)[0] if backend == "auto" else _named(backend, problem)
        return selected.scaled_mm(a, b, bias, problem)
    if is_row_by_row() and accumulate == Accumulate.FP32 and len(a.data) > 1:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 (a context that sees each access to a shape is slow)
            multiply = partial(scaled_mm, out_dtype=out_dtype, bias=bias, fast_accumulation=fast_accumulation)
            return torch.cat([multiply(row, b) for row in rows_of(a)])
    selected, problem = _select_product(a, b, out_dtype, bias, accumulate, fast_accumulation=fast_accumulation)
    return selected.scaled_mm(a, b, bias, problem)


def select_product(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    accumulate: Accumulate,
    *,
    fast_accumulation: bool,
    preferred: str | None = None,
) -> tuple[str, MatmulProblem]:
    """Select a backend as :func:`scaled_mm` does, or ``preferred`` where it can; returns its name, and the problem."""
    options = (out_dtype, bias, accumulate)
    selected, problem = _select_product(a, b, *options, fast_accumulation=fast_accumulation, preferred=preferred)
    return selected.name, problem


def _select_product(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    accumulate: Accumulate,
    *,
    fast_accumulation: bool,
    preferred: str | None = None,
) -> tuple[Backend, MatmulProblem]:
    call = _call(a, b, out_dtype, bias, accumulate, fast_accumulation, torch.is_grad_enabled(), preferred)
    try:
        entry = _gemm_choices.get(call)
    except TypeError:  # an unhashable argument is invalid; _describe raises for it
        entry = None
    if entry is None:
        problem = _describe(a, b, out_dtype, bias, accumulate, fast_accumulation=fast_accumulation)
        backends = BACKENDS
        if preferred is not None:
            backends = tuple(sorted(BACKENDS, key=lambda backend: backend.name != preferred))
        entry = _select(problem, backends)
        if len(_gemm_choices) < _MOST_CHOICES:
            _gemm_choices[call] = entry
    selected, selection = entry
    return selected, selection.problem


def _call(a: object, b: object, *options: object) -> tuple[object, ...]:
    """Key of a checked call: all properties that its checks depend on."""
    described: list[object] = []
    for value in (a, b, *options):
        if isinstance(value, QuantizedTensor):
            described += (value.data.shape, value.data.dtype, value.data.device, value.granularity, value.hp_dtype)
            described.append(value.scale.requires_grad)
        elif isinstance(value, Tensor):
            described += (value.shape, value.dtype, value.device, value.requires_grad)
        else:
            described.append(value)
    return tuple(described)


def explain(problem: _Problem) -> Selection[_Problem]:
    """Explain which backend "auto" selects for a GEMM or a cast, and why it rejects those before it.

    Raises:
        BackendError: none can run it.
    """
    if isinstance(problem, CastProblem):
        return _select(problem, CAST_BACKENDS)[1]
    return _select(problem, BACKENDS)[1]


def _select(problem: _Problem, backends: tuple[_Backend, ...]) -> tuple[_Backend, Selection[_Problem]]:
    backend, rejected = _first_able(problem, backends)
    return backend, Selection(problem, backend.name, tuple(rejected))


def _first_able(problem: _Problem, backends: tuple[_Backend, ...]) -> tuple[_Backend, list[tuple[str, str]]]:
    """The first backend that supports a problem, and why those before it do not."""
    rejected: list[tuple[str, str]] = []
    for backend in backends:
        reason = backend.unsupported_reason(problem)  # type: ignore[arg-type]
        if reason is None:
            return backend, rejected
        rejected.append((backend.name, reason))
    raise BackendError(
        f"no backend can run this {problem.noun}: {'; '.join(f'{name}: {why}' for name, why in rejected)}"
    )


def selections() -> tuple[Selection[MatmulProblem], ...]:
    """The choices of "auto" in this process, oldest first; those of the first 1024 different calls."""
    return tuple(dict.fromkeys(selection for _, selection in _gemm_choices.values()))


def check_operands(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a product's result; None stands for ``a.hp_dtype``.

    Raises:
        ConfigError: an operand is not quantized, or ``out_dtype`` is not supported.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, QuantizedTensor):
            raise ConfigError(
                f"{name} must be a QuantizedTensor, not {type(operand).__name__}; octavo.quantize makes one"
            )
    out_dtype = a.hp_dtype if out_dtype is None else out_dtype
    if out_dtype not in _OUT_DTYPES:
        raise ConfigError(f"out_dtype must be bfloat16, float16 or float32, not {out_dtype}")
    return out_dtype


def _named(name: str, problem: MatmulProblem) -> Backend:
    backend = _backend(name)
    reason = backend.unsupported_reason(problem)
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot run this product: {reason}; use backend='auto'")
    return backend


def _backend(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise BackendError(f"there is no backend {name!r}; use 'auto' or one of {', '.join(b.name for b in BACKENDS)}")


def _describe(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    accumulate: Accumulate,
    *,
    fast_accumulation: bool = False,
) -> MatmulProblem:
    out_dtype = check_operands(a, b, out_dtype)
    if a.data.ndim != 2 or b.data.ndim != 2:
        raise ConfigError(
            f"scaled_mm multiplies matrices, not shapes {tuple(a.shape)} and {tuple(b.shape)}; flatten them"
        )
    if a.shape[1] != b.shape[1]:
        raise ConfigError(
            f"scaled_mm computes a @ b.T and needs equal K: a is {tuple(a.shape)}, b is {tuple(b.shape)}; "
            "pass b as [N, K]"
        )
    if bias is not None:
        check_float(bias, "bias")
    _check_devices(a, b, bias)
    if accumulate not in _ACCUMULATE:
        raise ConfigError(f"accumulate must be one of {', '.join(Accumulate)}, not {accumulate!r}")
    if bias is not None and bias.shape != (b.shape[0],):
        raise ConfigError(f"bias must have shape ({b.shape[0]},), not {tuple(bias.shape)}")
    return MatmulProblem(
        m=a.shape[0],
        n=b.shape[0],
        k=a.shape[1],
        device=a.data.device.type,
        a_dtype=a.data.dtype,
        b_dtype=b.data.dtype,
        a_granularity=a.granularity,
        b_granularity=b.granularity,
        out_dtype=out_dtype,
        bias=bias is not None,
        accumulate=_ACCUMULATE[_ACCUMULATE.index(accumulate)],
        fast_accumulation=fast_accumulation,
        scale_needs_grad=torch.is_grad_enabled() and (a.scale.requires_grad or b.scale.requires_grad),
        bias_needs_grad=torch.is_grad_enabled() and bias is not None and bias.requires_grad,
    )


def _check_devices(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> None:
    """Raise ConfigError for operands on different devices: a kernel that reads another's memory ends the process."""
    device = a.data.device
    named = {"a's scale": a.scale, "b": b.data, "b's scale": b.scale, "bias": bias}
    for name, tensor in named.items():
        if tensor is not None and tensor.device != device:
            raise ConfigError(f"{name} is on {tensor.device} and a on {device}; move it there first")
