"""The linear layer of a mixture of experts in FP8: rows sorted by expert, each expert's multiplied by its own weight.

    output[t]      = input[t] @ weight[e].T + bias[e]       offsets[e] ≤ t < offsets[e + 1], weight [E, N, K]
    grad_input[t]  = grad_output[t] @ weight[e]
    grad_weight[e] = Σ_t grad_output[t].T @ input[t]        over the expert's rows; 0 without any

Every expert is a linear layer of its own, with the numbers of :func:`octavo.functional.fp8_linear`: a scale "per
tensor" is one for each expert's weight and one for the rows that it gets, blocks begin anew with each expert's rows,
and delayed scaling has a history for each. An expert without rows casts nothing and records nothing.

Separate calls would cost more than the casts and GEMMs of small experts, and autograd would write a gradient of all
weights for each one's. Here all experts are one autograd function, whose casts and GEMMs of one kind are one call
(:mod:`octavo.kernels.each`). Backward casts weights again rather than to save their codes: a layer's codes are
as large as all of its experts, of which most see few rows.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.errors import ConfigError
from octavo.functional.linear import multiply
from octavo.functional.saved_operands import load_operands, save_operands
from octavo.kernels import EachRecord, cast_each, scaled_mm_each
from octavo.kernels.backend import refuse_transforms
from octavo.numerics import Accumulate, CastSpec, PerTensor, QuantizedTensor, Scaling
from octavo.recipes import GemmSpec, Recipe
from octavo.scaling import GRAD_OUTPUT, INPUT, WEIGHT, LayerScaling, Operand, OperandScaling, inside_backward

__all__ = ["fp8_grouped_linear"]


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 (the numbers of rows are read on the host)
def fp8_grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    recipe: Recipe,
    *,
    scaling: LayerScaling | None = None,
) -> Tensor:
    """Compute ``x[t] @ weight[e].T + bias[e]`` for each row t and its expert e, with the casts and GEMMs of ``recipe``.

    Args:
        x: [T, K], its rows sorted by expert; float16, bfloat16 or float32 (float64 is computed in float32).
        weight: [E, N, K], any of these dtypes; a transposed view of [E, K, N] may be passed.
        bias: [E, N] or None; added in FP32 before the output is rounded.
        offsets: [E + 1], int32 or int64, rising from 0 to T or less: where each expert's rows begin, and where the last
            one's end. Rows beyond belong to none: their outputs and gradients are 0. On a GPU the host waits for it.
        recipe: the casts and GEMMs.
        scaling: as for :func:`octavo.functional.fp8_linear`, with one amax, scale and record for each expert: [3, E]
            and [E]. The counts of non-finite elements are those of all experts, [3].

    Returns:
        [T, N] in ``x``'s dtype. Gradients have the dtypes of their tensors.

    Raises:
        BackendError: a transform of ``torch.func`` is running.
        ConfigError: tensors of other shapes or invalid offsets; a static input of an expert without a scale.

    Example:
        >>> from octavo import recipes
        >>> x, weight = torch.ones(3, 4), torch.stack([torch.ones(2, 4), torch.full((2, 4), 2.0)])
        >>> y = fp8_grouped_linear(x, weight, None, torch.tensor([0, 1, 3]), recipes.get("tensorwise"))
        >>> torch.allclose(y, torch.tensor([[4.0], [8.0], [8.0]]).expand(3, 2))
        True
    """
    _check(x, weight, bias, offsets)
    refuse_transforms("FP8 linear layers")
    computed = x.float() if x.dtype is torch.float64 else x
    y: Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        computed, weight, bias, recipe, _rows(offsets, len(x)), scaling or LayerScaling(), torch.is_grad_enabled()
    )
    return y if y.dtype is x.dtype else y.to(x.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ConfigError(f"experts multiply x [T, K] and weights [E, N, K], not {list(x.shape)}, {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ConfigError(f"the bias of experts must be {list(weight.shape[:2])}, not {list(bias.shape)}")
    if not isinstance(offsets, Tensor):
        raise ConfigError(f"offsets must be a tensor, not a {type(offsets).__name__}; pass torch.tensor(offsets)")
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.shape != (len(weight) + 1,):
        raise ConfigError(
            f"offsets must be int32 or int64 [{len(weight) + 1}], not {offsets.dtype} {list(offsets.shape)}"
        )
    if offsets.is_meta:
        raise ConfigError("offsets are on the meta device, which has no values; pass them on the device of the rows")


@dataclass(frozen=True, slots=True)
class _Rows:
    """The experts that have rows, and their numbers of rows.

    Attributes:
        experts: their indices.
        counts: how many rows each of them has.
        beyond: rows that belong to none, the last.
    """

    experts: tuple[int, ...]
    counts: tuple[int, ...]
    beyond: int

    def split(self, x: Tensor) -> list[Tensor]:
        """The rows of each."""
        parts = x.split([*self.counts, self.beyond])
        return list(parts[:-1])

    def select(self, stack: Tensor) -> list[Tensor]:
        """Their matrices of a stack."""
        matrices = stack.unbind(0)
        return [matrices[expert] for expert in self.experts]


def _rows(offsets: Tensor, total: int) -> _Rows:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > total or bounds != sorted(bounds):
        raise ConfigError(f"offsets must rise from 0 to the {total} rows or less, not be {bounds}")
    counts = [end - start for start, end in pairwise(bounds)]
    experts = [expert for expert, count in enumerate(counts) if count]
    return _Rows(tuple(experts), tuple(counts[expert] for expert in experts), total - bounds[-1])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd.Function takes no keywords)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        rows: _Rows,
        scaling: LayerScaling,
        learning: bool,  # ctx.needs_input_grad ignores torch.no_grad()
    ) -> Tensor:
        for_input, for_weight = (learning and needed for needed in ctx.needs_input_grad[:2])
        inputs_scaling, weights_scaling = _scaling(scaling, INPUT, rows), _scaling(scaling, WEIGHT, rows)
        if not ctx.needs_input_grad[1]:
            weights_scaling.forget_amax()
        is_repeated = inside_backward()  # by activation checkpointing: tokens and elements are counted already
        if is_repeated:
            inputs_scaling.forget_count()
            weights_scaling.forget_count()
        spec, transposed_spec = recipe.output.a, recipe.grad_weight.b
        parts = _Matrices(rows.split(_side_by_side(x)))
        inputs = _cast(parts, spec, inputs_scaling)
        saved = _cast(parts.t(), transposed_spec, inputs_scaling, known=(spec, inputs)) if for_weight else []
        matrices = _matrices(weight, rows)
        weights = _cast(matrices, recipe.output.b, weights_scaling)
        if scaling.experts_watch is not None and not is_repeated:
            scaling.experts_watch.cast(INPUT, spec, parts.tensors(), inputs, rows.experts)
            scaling.experts_watch.cast(WEIGHT, recipe.output.b, matrices.tensors(), weights, rows.experts)
        out = (x.new_zeros if rows.beyond else x.new_empty)((len(x), weight.shape[1]))
        biases = None if bias is None else rows.select(bias)
        _multiply(inputs, weights, recipe.output, rows.split(out), biases, emulate=recipe.emulate_tensor_cores)
        kept = [weight, weights_scaling.amax, weights_scaling.measured] if for_input else [None, None, None]
        save_operands(ctx, [*saved, *kept], scaling.amaxes)
        ctx.for_weight = for_weight
        ctx.recipe, ctx.scaling, ctx.rows = recipe, scaling.with_amaxes(None), rows
        ctx.x_layout, ctx.weight_layout = (x.shape, x.dtype), (weight.shape, weight.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        rows: _Rows = ctx.rows
        saved, amaxes = load_operands(ctx)
        inputs: list[Any] = saved[:-3]
        weight, weight_amax, weight_measured = cast("list[Tensor | None]", saved[-3:])
        scaling = _scaling(ctx.scaling.with_amaxes(amaxes), GRAD_OUTPUT, rows)
        parts = _Matrices(rows.split(_side_by_side(grad_output)))
        emulate = recipe.emulate_tensor_cores
        grad_input = grad_weight = grad_bias = None
        left_spec, left = recipe.grad_input.a, list[Operand]()
        if weight is not None:
            left = _cast(parts, left_spec, scaling)
            if ctx.scaling.experts_watch is not None:
                ctx.scaling.experts_watch.cast(GRAD_OUTPUT, left_spec, parts.tensors(), left, rows.experts)
            right_scaling = _Scaling(weight_amax, measured=weight_measured)
            right = _cast(_matrices(weight, rows).t(), recipe.grad_input.b, right_scaling)
            shape, dtype = ctx.x_layout
            grad_input = grad_output.new_zeros(shape, dtype=dtype)
            _multiply(left, right, recipe.grad_input, rows.split(grad_input), emulate=emulate)
        if ctx.for_weight:
            left = _cast(parts.t(), recipe.grad_weight.a, scaling, known=(left_spec, left))
            shape, dtype = ctx.weight_layout
            grad_weight = (torch.empty if len(rows.experts) == shape[0] else torch.zeros)(
                shape, dtype=dtype, device=grad_output.device
            )
            _multiply(left, inputs, recipe.grad_weight, rows.select(grad_weight), emulate=emulate)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.new_zeros(ctx.weight_layout[0][:2], dtype=ctx.bias_dtype)
            for each, part in zip(rows.select(grad_bias), rows.split(grad_output), strict=True):
                each.copy_(part.sum(dim=0, dtype=torch.float32))
        return grad_input, grad_weight, grad_bias, None, None, None, None


class _Matrices(NamedTuple):
    """Matrices, or their transposes; columns lie side by side in memory."""

    memory: list[Tensor]
    transposed: bool = False

    def t(self) -> "_Matrices":
        return _Matrices(self.memory, not self.transposed)

    def tensors(self) -> list[Tensor]:
        return [each.t() if self.transposed else each for each in self.memory]


def _side_by_side(x: Tensor) -> Tensor:
    """``x`` with its columns side by side, as an expanded gradient's are not."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _matrices(weight: Tensor, rows: _Rows) -> _Matrices:
    """The weights [N, K] of the experts that have rows, whichever way they are stored."""
    if weight.stride(2) != 1 and weight.stride(1) == 1:
        return _Matrices(rows.select(weight.transpose(1, 2)), transposed=True)
    return _Matrices(rows.select(weight if weight.stride(2) == 1 else weight.contiguous()))


@dataclass(slots=True)
class _Scaling:
    """Scaling of one role of the experts that have rows; as :class:`octavo.scaling.OperandScaling` for one tensor.

    Attributes:
        amax: float32 [G], of finished steps; 0 before the first; None without delayed scaling.
        scale: float32 [G], of a static cast.
        record: where to record the first cast; later ones are of the same tensors.
        measured: float32 [G], the amaxes that a first dynamic cast with one scale a tensor has found.
    """

    amax: Tensor | None
    scale: Tensor | None = None
    record: EachRecord = field(default_factory=EachRecord)
    measured: Tensor | None = None

    def forget_amax(self) -> None:
        """Record no amax."""
        self.record = replace(self.record, amax=None)

    def forget_count(self) -> None:
        """Count no non-finite elements."""
        self.record = replace(self.record, nonfinite=None)


def _scaling(scaling: LayerScaling, role: int, rows: _Rows) -> _Scaling:
    of_role: OperandScaling = scaling.of(role)
    index = torch.tensor(rows.experts, dtype=torch.int64)
    amax, scale = (None if each is None else each[index.to(each.device)] for each in (of_role.amax, of_role.scale))
    record = EachRecord(rows.experts, of_role.pending, of_role.overflowed, of_role.nonfinite)
    return _Scaling(amax, scale, record)


def _cast(
    matrices: _Matrices,
    spec: CastSpec | None,
    scaling: _Scaling,
    *,
    known: tuple[CastSpec | None, list[Operand]] = (None, []),
) -> list[Operand]:
    """Operands of a GEMM.

    Args:
        matrices: [rows, K] each, K what the GEMM sums over.
        spec: how to cast; None leaves them as they are.
        scaling: of their role; its record is taken.
        known: how their transposes were cast, and the result, which serves where groups do not depend on orientation.
    """
    known_spec, operands = known
    if spec is None or not matrices.memory:
        return list(matrices.tensors())
    if operands and spec == known_spec and spec.granularity.orientation_free:
        return [each.t() for each in operands]
    static, delayed = spec.scaling == Scaling.STATIC, spec.scaling == Scaling.DELAYED
    if static and (scaling.scale is None or not bool((scaling.scale > 0).all())):
        raise ConfigError("an expert has rows, and its static input no scale; calibrate the model on more tokens")
    amax = scaling.amax if delayed else scaling.measured if isinstance(spec.granularity, PerTensor) else None
    record, scaling.record = scaling.record, EachRecord()
    codes, measured = cast_each(
        matrices.memory,
        spec,
        transposed=matrices.transposed,
        amax=None if static else amax,
        scale=scaling.scale if static else None,
        measure_if_zero=delayed,
        record=record,
    )
    if scaling.measured is None and not delayed:
        scaling.measured = measured
    return list(codes)


def _multiply(
    a: list[Operand],
    b: list[Operand],
    gemm: GemmSpec,
    outs: list[Tensor],
    biases: list[Tensor] | None = None,
    *,
    emulate: bool,
) -> None:
    """Write ``a[i] @ b[i].T + biases[i]`` into ``outs``: in FP8 where both operands are codes."""
    codes = [[each for each in operands if isinstance(each, QuantizedTensor)] for operands in (a, b)]
    if outs and len(codes[0]) == len(codes[1]) == len(outs) and outs[0].dtype is not torch.float64:
        left_codes, right_codes = codes
        scaled_mm_each(
            left_codes,
            right_codes,
            outs,
            biases=biases,
            accumulate=gemm.accumulate if emulate else Accumulate.FP32,
            fast_accumulation=gemm.accumulate is Accumulate.HOPPER_FAST and not emulate,
        )
        return
    for number, (left, right, out) in enumerate(zip(a, b, outs, strict=True)):
        bias = None if biases is None else biases[number]
        out.copy_(multiply(left, right, gemm, out.dtype, emulate=emulate, bias=bias))
