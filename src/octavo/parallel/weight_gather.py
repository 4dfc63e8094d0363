"""The gather of one layer's weight by FSDP2, as the codes and scales that its recipe multiplies.

FSDP2 gathers a weight before a layer's forward pass, frees it, and gathers it again before its backward pass.
A recipe may cast the weight differently for its two GEMMs:

    output      = input @ weight.T           cast of the weight [N, K]
    grad_input  = grad_output @ weight       cast of its transpose [K, N]

A gather sends the codes of the pass that it precedes, one byte an element; both where the weight stays gathered for the
other pass, or where activation checkpointing repeats the forward pass inside of backward. One cast serves both if the
recipe's casts are the same and their groups do not depend on the orientation.

What needs the weight's values is sent in high precision, as FSDP2 does without octavo: GEMMs in high precision (such as
those inside ``octavo.autocast(enabled=False)``), steps that the doctor inspects, and the recipes that
:func:`high_precision_reason` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.autocast import active_recipe
from octavo.errors import ConfigError
from octavo.functional import Recompute, RecomputedOperand, WeightOperands
from octavo.nn import Linear
from octavo.numerics import AmaxRecord, CastSpec, Measurement, PerRow, QuantizedTensor, Scaling
from octavo.parallel.fsdp2 import ShardedParameter
from octavo.parallel.gathered_tensors import GatheredWeight
from octavo.parallel.shard_cast import ShardCast
from octavo.recipes import Close, Recipe
from octavo.scaling import EMPTY, WEIGHT, OperandScaling, inside_backward
from octavo.scaling.step_amaxes import StepAmaxes

__all__ = ["WeightGather", "high_precision_reason"]

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, kw_only=True)
class _Gathered:
    """Content of a gather.

    Attributes:
        recipe: the recipe that it was cast for.
        casts: by pass; empty where the weight was gathered in high precision.
        amaxes: of the casts.
        record: what the casts have measured of this rank's rows.
        sizes: bytes of this rank's parts.
        dtype: of the values cast, or sent.
        parts: codes and scales of each different cast, or the values; of all ranks.
    """

    recipe: Recipe
    casts: dict[str, ShardCast]
    amaxes: dict[ShardCast, Tensor]
    record: AmaxRecord
    sizes: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _GatheredTranspose(Recompute):
    """The right operand of grad_input's GEMM, from the gather before the backward pass."""

    gather: "WeightGather"
    recipe: Recipe

    def compute(self, *_: Tensor | None) -> QuantizedTensor | Tensor:
        """Return the operand [K, N]."""
        if self.recipe.grad_input.b is None:
            return self.gather.values(self.gather.parameter.dtype).t()
        operand = self.gather.operand(BACKWARD, self.recipe)
        return operand.t() if not self.gather.cast_of(BACKWARD).transposed else operand


class WeightGather:
    """The gather of a layer's weight; :class:`octavo.nn.Linear` asks it for operands.

    Args:
        layer: an octavo layer.
        parameter: its weight, as FSDP2 shards it.
        step: the model's reduction of amaxes.
    """

    def __init__(self, layer: Linear, parameter: ShardedParameter, step: StepAmaxes) -> None:
        self.layer, self.parameter, self.step = layer, parameter, step
        self.measured: tuple[object, ...] = ()
        self.amaxes: dict[ShardCast, Tensor] = {}
        self._gathered: _Gathered | None = None
        self._outputs: tuple[Tensor | None, ...] = ()
        self._repeats_forward = False
        self.last_generation = -1
        step.weights[layer] = self

    # As a MeasuredWeight

    def state(self) -> tuple[object, ...]:
        """Return the optimizer's step, versions of the sharded parameter and of past amaxes, and the casts."""
        steps = self.layer.scale_updates.optimizer_steps if self.layer.stored_weight.requires_grad else 0
        history = self.layer.amax_history
        past = None if history is None else history.amax._version  # noqa: SLF001
        return self.step.generation, steps, self.parameter.version(), past, *self.casts()

    def casts(self, *, has_past: bool = False) -> tuple[ShardCast, ...]:
        """Return the different casts of both passes; none where the weight is gathered in high precision."""
        recipe = self._recipe()
        if self._needs_values(recipe, (FORWARD,)):
            return ()
        passes = (FORWARD,) if recipe.grad_input.b is None else (FORWARD, BACKWARD)
        casts = dict.fromkeys(self._casts(recipe, passes).values())
        return tuple(each for each in casts if not (has_past and each.spec.scaling == Scaling.DELAYED))

    def past_amax(self) -> Tensor | None:
        """Return the amax of finished steps, float32 [], of a delayed recipe that has a history."""
        history = self.layer.amax_history
        return None if history is None or not self._recipe().is_delayed else history.amax[WEIGHT]

    def measure(self, cast: ShardCast) -> Tensor:
        """Return this rank's amaxes of a cast."""
        return cast.measure(self.parameter.local_tensor().detach())

    def groups(self) -> tuple[Any, ...]:
        """Return the process groups of the ranks that share the rows, and of those that have the weight's slices."""
        slices = self.parameter.slices()
        return (self.parameter.group(),) if slices is None else (self.parameter.group(), slices.group)

    def groups_of(self, cast: ShardCast) -> tuple[Any, ...]:
        """Return those of them whose ranks share scaling groups of a cast."""
        groups = () if cast.reduces_rows and cast.gathers_scales else (self.parameter.group(),)
        shared = self._slices_share(cast.spec, transposed=cast.transposed)
        return (*groups, *self.groups()[1:]) if shared else groups

    def attach(self) -> None:
        """Be the gather of the parameter's tensor, also where loading or moving a model has replaced it."""
        if self.parameter.attach(self):
            self.measured = ()

    # As an AllGather

    def pre_all_gather(self, shard: Tensor, ranks: int) -> tuple[tuple[Tensor, ...], _Gathered]:
        """Cast this rank's rows for the pass that begins."""
        recipe, passes = self._recipe(), self._passes()
        if self._needs_values(recipe, passes):
            dtype = self.parameter.gathered_dtype(shard.dtype)
            parts: tuple[Tensor, ...] = (self._padded(shard.to(dtype)), *(shard.new_empty(0, dtype=torch.uint8),) * 3)
            gathered = _Gathered(recipe=recipe, casts={}, amaxes={}, record=AmaxRecord(), sizes=(), dtype=dtype)
        else:
            if not inside_backward():
                self.step.begin_forward(self, is_held=self.layer.scale_updates.was_held)
            casts, amaxes = self._casts(recipe, passes), self.step.of(self)
            used = {cast: self._amax_in_force(cast, amaxes) for cast in casts.values()}
            record = _new_record(shard.device)
            parts = tuple(part for cast, amax in used.items() for part in cast.cast(shard, amax, record))
            parts += (shard.new_empty(0, dtype=torch.uint8),) * (4 - len(parts))
            gathered = _Gathered(recipe=recipe, casts=casts, amaxes=used, record=record, sizes=(), dtype=shard.dtype)
        gathered = replace(gathered, sizes=tuple(part.numel() for part in parts))
        if ranks == 1:  # FSDP2 then keeps the first part alone
            parts = (torch.cat(parts),)
        self._resize_outputs([part.numel() * ranks for part in parts])
        return parts, gathered

    def post_all_gather(self, outputs: tuple[Tensor, ...], gathered: _Gathered) -> None:
        """Take the gathered bytes."""
        self._outputs = tuple(output._base for output in outputs)  # noqa: SLF001 (FSDP2 passes views of what it keeps)
        parts = outputs
        if len(outputs) == 1:
            codes, scales, *others = outputs[0].split(gathered.sizes)
            second, second_scales = others
            parts = (codes, scales.clone(), second, second_scales.clone())  # a view of float32 must be aligned
        self._gathered = replace(gathered, parts=parts)

    def stand_in(self, dtype: torch.dtype) -> GatheredWeight:
        """Return a tensor of the weight's shape for the layer's parameter."""
        stand_in: GatheredWeight = GatheredWeight(self, self.parameter.shape, dtype, self.parameter.device)
        return stand_in

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values [N, K] where they were gathered."""
        gathered = self._current()
        if gathered.casts:
            raise ConfigError(
                f"the weight of {self.layer.called} was gathered as FP8 codes of recipe {gathered.recipe.name!r}, and "
                "something reads its values; enter octavo.autocast around the whole model, not inside of it, and "
                "leave layers whose weights other code reads out of octavo.parallel.gather_in_fp8 by its skip"
            )
        rows, columns = self.parameter.shape
        values = gathered.parts[0].view(gathered.dtype)[: rows * columns].view(rows, columns)
        return values.to(dtype)

    # For the layer

    def operands(self, recipe: Recipe, scaling: OperandScaling) -> WeightOperands:
        """Return the weight's operands under ``recipe``, which ``scaling`` casts where values were gathered."""
        if not inside_backward():
            self._repeats_forward = _may_repeat_forward()
        transposed = RecomputedOperand(_GatheredTranspose(self, recipe), ())
        if not self._current().casts:
            values, unwatched = self.values(self.parameter.dtype), self.layer.watch is None
            in_high_precision = transposed if unwatched and recipe.grad_input.b is None else None
            return WeightOperands(values, recipe, scaling, recast=unwatched, transposed=in_high_precision)
        operand = self.operand(FORWARD, recipe)
        if not self.layer.stored_weight.requires_grad:
            scaling.pending = None
        if inside_backward():  # the repeated call's elements are counted already
            scaling.nonfinite = None
        record = self._current().record
        assert record.amax is not None
        scaling.take().add(Measurement(record.amax, record.nonfinite))
        return WeightOperands(operand, recipe, transposed=transposed)

    def operand(self, name: str, recipe: Recipe) -> QuantizedTensor:
        """Return the operand of a pass: [N, K], or [K, N] where it is a cast of the transpose."""
        gathered = self._current()
        cast = gathered.casts.get(name)
        if cast is None or _weight_casts(recipe) != _weight_casts(gathered.recipe):
            raise ConfigError(
                f"{self.layer.called} needs its weight for the {name} pass of recipe {recipe.name!r}, and it was "
                f"gathered for the {' and the '.join(gathered.casts) or 'high-precision'} pass of "
                f"{gathered.recipe.name!r}; enter octavo.autocast around the whole model, and run forward outside of "
                "other models' backward passes"
            )
        at = 2 * list(gathered.amaxes).index(cast)
        codes, scales = gathered.parts[at : at + 2]
        return cast.whole(codes, scales, gathered.amaxes[cast], gathered.dtype)

    def cast_of(self, name: str) -> ShardCast:
        """Return the cast of a pass."""
        return self._current().casts[name]

    def clear(self) -> None:
        """Forget the weight's amaxes; all ranks must."""
        self.measured = ()

    def _current(self) -> _Gathered:
        gathered = self._gathered
        if gathered is None or not any(part.untyped_storage().size() for part in gathered.parts):
            raise ConfigError(
                f"the weight of {self.layer.called} is not gathered now; call the module that fully_shard was given, "
                "or its unshard() first"
            )
        return gathered

    def _recipe(self) -> Recipe:
        """The recipe of the pass that begins."""
        if inside_backward() and self.layer.last_recipe is not None:
            return self.layer.last_recipe
        return active_recipe(self.layer.recipe)

    def _passes(self) -> tuple[str, ...]:
        """The passes that the gather must serve."""
        if self.parameter.stays_gathered() or (inside_backward() and self._repeats_forward):
            return FORWARD, BACKWARD
        return (BACKWARD,) if inside_backward() else (FORWARD,)

    def _needs_values(self, recipe: Recipe, passes: tuple[str, ...]) -> bool:
        specs = {FORWARD: recipe.output.b, BACKWARD: recipe.grad_input.b}
        if any(specs[name] is None for name in passes) or self.layer.watch is not None:
            return True
        return high_precision_reason(self.layer, recipe) is not None

    def _casts(self, recipe: Recipe, passes: tuple[str, ...]) -> dict[str, ShardCast]:
        shape, (ranks, rank) = self.parameter.shape, self.parameter.ranks_and_rank()
        forward, backward = recipe.output.b, recipe.grad_input.b
        assert forward is not None
        by_rows = isinstance(forward.granularity, PerRow) and self._slices_share(forward, transposed=False)
        first = ShardCast(spec=forward, transposed=False, shape=shape, ranks=ranks, rank=rank, reduces_rows=by_rows)
        casts = {FORWARD: first}
        if backward is not None:
            serves_both = forward == backward and forward.granularity.orientation_free
            transposed = ShardCast(spec=backward, transposed=True, shape=shape, ranks=ranks, rank=rank)
            casts[BACKWARD] = casts[FORWARD] if serves_both else transposed
        return {name: casts[name] for name in passes}

    def _slices_share(self, spec: CastSpec, *, transposed: bool) -> bool:
        """Return whether several slices of tensor parallelism have elements of one scaling group."""
        slices = self.parameter.slices()
        return slices is not None and slices.divides_groups(spec.granularity, transposed=transposed)

    def _amax_in_force(self, cast: ShardCast, reduced: Mapping[ShardCast, Tensor]) -> Tensor:
        """The amaxes to cast with: reduced ones, or of a delayed cast those of finished steps, where there are such."""
        if cast in reduced:
            return reduced[cast]
        past = self.past_amax()
        assert past is not None
        return past.clone().expand(len(cast.reduced), cast.width)

    def _padded(self, shard: Tensor) -> Tensor:
        """The bytes of a shard, with as many rows on every rank."""
        ranks, _ = self.parameter.ranks_and_rank()
        rows, columns = self.parameter.shape
        padded = shard.new_zeros((-(-rows // ranks), columns))
        padded[: len(shard)] = shard
        return padded.flatten().view(torch.uint8)

    def _resize_outputs(self, sizes: list[int]) -> None:
        """Fit the tensors that FSDP2 gathers into, which it makes once, to a gather of another size."""
        for output, size in zip(self._outputs, sizes, strict=False):
            if output is not None and output.numel() != size:
                output.resize_(size)


def high_precision_reason(layer: Linear, recipe: Recipe) -> str | None:
    """Return why a layer's weight is gathered in high precision under ``recipe``; None where codes are."""
    if recipe.output.b is None:
        return f"recipe {recipe.name!r} casts no weight"
    if any(spec is not None and spec.engine is not None for spec in (recipe.output.b, recipe.grad_input.b)):
        return f"recipe {recipe.name!r} casts it as another engine does, whose scales are of the whole weight"
    if recipe.history is not None and recipe.history.close == Close.AUTOCAST:
        return f"recipe {recipe.name!r} ends steps inside of the forward pass, after the weight was gathered"
    if recipe.is_delayed and layer.scale_updates.group is not None:
        return "its amaxes are reduced over another group than the default one (convert's amax_group)"
    return None


def _new_record(device: torch.device) -> AmaxRecord:
    amax = torch.tensor(EMPTY, dtype=torch.float32, device=device)
    return AmaxRecord(amax, nonfinite=torch.zeros((), dtype=torch.int64, device=device))


def _weight_casts(recipe: Recipe) -> tuple[object, object]:
    return recipe.output.b, recipe.grad_input.b


def _may_repeat_forward() -> bool:
    """Return whether activation checkpointing may repeat the running forward pass in backward.

    It runs forward without gradients, or with hooks on saved tensors; other users of such hooks cost bytes alone.
    """
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
    return hooks is not None or not torch.is_grad_enabled()
