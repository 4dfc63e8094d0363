"""Interfaces of cast and GEMM backends, and the descriptions of their problems.

``numerics/`` defines the results; a backend only decides the speed. ``unsupported_reason(problem)`` returns a clause or
None, so that a selection can always be explained, and a backend that is requested by name raises its reason instead of
falling back.
"""

from typing import NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import Format
from octavo.numerics import (
    Accumulate,
    AmaxRecord,
    CastSpec,
    Granularity,
    Measurement,
    PerBlock,
    QuantizedTensor,
    Rounding,
)

__all__ = [
    "Backend",
    "CastBackend",
    "CastProblem",
    "CastResult",
    "MatmulProblem",
    "ScaleSource",
    "block_widths",
    "inside_transform",
    "product_shape",
    "refuse_transforms",
]


class CastProblem(NamedTuple):
    """Description of a cast, without its values: all that a cast backend's support may depend on.

    A tuple, as is :class:`MatmulProblem`, since torch.compile traces no code to make one.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor in high precision.
        device: device type, such as "cpu".
        format: of the codes.
        granularity: scaling groups.
        rounding: to the nearest code, or stochastic.
        scale_given: whether the scale, or the amax that it is made from, is passed instead of measured.
        transformed: whether the tensor is one of torch.func's, which have no memory.
        decodes: whether codes are decoded to ``dtype``, instead of cast from it.
        foreign: whether the scales and codes are those of another engine's arithmetic.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: str
    format: Format
    granularity: Granularity
    rounding: Rounding = Rounding.NEAREST
    scale_given: bool = False
    transformed: bool = False
    decodes: bool = False
    foreign: bool = False

    @property
    def noun(self) -> str:
        """Name of the problem in messages."""
        return "cast"

    @classmethod
    def of(cls, x: Tensor, fmt: Format, granularity: Granularity) -> "CastProblem":
        """Describe a cast of ``x`` to the nearest code, with the scales that it measures."""
        return cls(
            shape=x.shape,
            dtype=x.dtype,
            device=x.device.type,
            format=fmt,
            granularity=granularity,
            transformed=inside_transform(),
        )


class CastResult(NamedTuple):
    """Result of a cast.

    Attributes:
        output: the tensor's codes and scale.
        transposed: codes and scale of the transpose, cast by itself; None unless it was requested.
        measurement: amaxes and number of NaN and ±Inf elements; None where a kernel has recorded them already.
        saturated: int64 [], finite elements beyond the format's maximum after scaling; None if not counted.
        underflowed: int64 [], nonzero elements whose code is zero; None if not counted.
    """

    output: QuantizedTensor
    transposed: QuantizedTensor | None = None
    measurement: Measurement | None = None
    saturated: Tensor | None = None
    underflowed: Tensor | None = None


class ScaleSource(TypedDict, total=False):
    """Source of a cast's scale, as keyword arguments; without any, the scale is computed from the tensor.

    Attributes:
        amax: float32 in the scale's shape, from which the scale is computed.
        scale: float32 in the scale's shape, used unchanged.
        measure_if_zero: use the measured amax for a group whose passed amax is 0.
    """

    amax: Tensor | None
    scale: Tensor | None
    measure_if_zero: bool


class CastBackend(Protocol):
    """Casts the tensors it supports, and decodes their codes."""

    @property
    def name(self) -> str:
        """Name of the backend in selections."""
        ...

    def unsupported_reason(self, problem: CastProblem) -> str | None:
        """Why this problem cannot run here, as a clause; None when it can."""
        ...

    def cast(
        self,
        x: Tensor,
        spec: CastSpec,
        *,
        transpose: bool = False,
        record: AmaxRecord | None = None,
        **source: Unpack[ScaleSource],
    ) -> CastResult:
        """Cast ``x``; see :func:`octavo.kernels.dispatch.cast`, which completes the result.

        A backend may leave ``transposed`` None although ``transpose`` is set. Where it writes ``record`` itself, the
        result has no measurement.
        """
        ...

    def fake_quantize(self, x: Tensor, spec: CastSpec, *, out: Tensor | None = None) -> Tensor | None:
        """Values of the codes that :meth:`cast` makes, in ``out`` if given; None where no kernel skips the codes."""
        ...

    def dequantize(self, codes: Tensor, scale: Tensor, granularity: Granularity, out_dtype: torch.dtype) -> Tensor:
        """``fp32(codes) · scale``, rounded once to ``out_dtype``."""
        ...


def inside_transform() -> bool:
    """Return whether torch.func transforms the running code; False in a traced graph."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001


def refuse_transforms(operation: str) -> None:
    """Raise BackendError inside torch.func, for which octavo's autograd functions define no rule."""
    if inside_transform():
        raise BackendError(
            f"torch.func (grad, vmap, jvp and others) does not support {operation}; use backward() or "
            "torch.autograd.grad, or octavo.autocast(enabled=False), in which layers run in high precision"
        )


class MatmulProblem(NamedTuple):
    """Description of ``y = a @ b.T``, without its values: all that a backend's support may depend on.

    Attributes:
        m, n, k: a is [m, k], b is [n, k], y is [m, n].
        device: device type, such as "cpu".
        a_dtype, b_dtype: dtypes of the codes.
        a_granularity, b_granularity: scaling groups of the operands.
        out_dtype: dtype of y.
        bias: whether a bias is added before y is rounded.
        accumulate: how the products must be added.
        fast_accumulation: whether a GPU may keep fewer bits while it adds; a hint, where ``accumulate`` is FP32.
        scale_needs_grad: whether autograd records y for a scale that requires a gradient.
        bias_needs_grad: whether autograd records y for a bias that requires a gradient.
    """

    m: int
    n: int
    k: int
    device: str
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    a_granularity: Granularity
    b_granularity: Granularity
    out_dtype: torch.dtype
    bias: bool
    accumulate: Accumulate
    fast_accumulation: bool = False
    scale_needs_grad: bool = False
    bias_needs_grad: bool = False

    @property
    def noun(self) -> str:
        """Name of the problem in messages."""
        return "product"

    @property
    def needs_grad(self) -> bool:
        """Whether y needs a gradient function."""
        return self.scale_needs_grad or self.bias_needs_grad


class Backend(Protocol):
    """Executes :func:`octavo.scaled_mm` for the problems it supports."""

    @property
    def name(self) -> str:
        """Name by which users select it."""
        ...

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """Why this problem cannot run here, as a clause; None when it can."""
        ...

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """``(a.data @ b.data.T) · a.scale · b.scale.T + bias``: summed as ``accumulate`` says, rounded once."""
        ...


def block_widths(problem: MatmulProblem) -> set[int]:
    """Widths along K of the blocks that share a scale; empty where the scales apply to the finished sums."""
    return {g.columns for g in (problem.a_granularity, problem.b_granularity) if isinstance(g, PerBlock)}


def product_shape(a: Tensor, *rest: object) -> Tensor:
    """Shape and dtype for tracing of a GEMM operator of a, its scale, b [.., N, K] and more: [M, N] in out_dtype."""
    _, b, *_ = (argument for argument in rest if isinstance(argument, Tensor))
    (out_dtype,) = (argument for argument in rest if isinstance(argument, torch.dtype))
    return a.new_empty((a.shape[0], b.shape[-2]), dtype=out_dtype)
