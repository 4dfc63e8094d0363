"""One cast of an input that several layers of a model are given: q, k and v of a block, gate and up.

The layers of a converted model share a :class:`SharedInput`, which holds the last input's codes until the next cast, or
until that input is gone. The next layer takes them if it is given the same tensor, unchanged, and casts it alike; then
backward keeps the codes once for all of these layers. Each layer counts NaN and ±Inf for itself as if it had cast.

Whether a tensor is unchanged is known from its version counter and address. So only an input that was computed and
takes a gradient is shared: autograd itself relies on its counter. Nothing guards a parameter, which fused optimizers
write without raising it, data that are read into one buffer again and again, nor an input in evaluation; there each
layer casts. So does

- a layer whose input has a delayed or static scale, which is its own;
- a compiled graph, where equal casts become one without help;
- a layer that the doctor watches, whose operands are measured as its own.
"""

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.functional import InputOperands, cast_input
from octavo.kernels.tracing import is_traced
from octavo.nn.row_gather import RowGather
from octavo.recipes import Recipe, Scaling
from octavo.scaling import OperandScaling, inside_backward

__all__ = ["SharedInput"]


@dataclass(slots=True)
class _SharedCast:
    """A cast of an input.

    Attributes:
        source: the input, which this does not keep alive.
        key: the state that the input was in, and how it was cast.
        operands: the result; without a transpose that is the input itself.
        nonfinite: int64 [], number of the input's NaN and ±Inf elements.
        learning: whether ``operands`` serve grad_weight too.
        stand_in: for the whole of an input that ranks divide.
    """

    source: "weakref.ref[Tensor]"
    key: tuple[object, ...]
    operands: InputOperands
    nonfinite: Tensor
    learning: bool
    stand_in: Tensor | None = None


class SharedInput:
    """The last input of a model's layers and its operands; a copied or pickled model starts without."""

    def __init__(self) -> None:
        self._last: _SharedCast | None = None

    def operands(
        self,
        source: Tensor,
        x: Tensor,
        recipe: Recipe,
        scaling: OperandScaling,
        *,
        learning: bool,
        memory: Tensor | None = None,
    ) -> InputOperands | None:
        """The operands of ``x``, cast now or for the layer before; None if this layer casts for itself.

        Args:
            source: a layer's input, [..., K].
            x: that in the dtype of ``torch.autocast``.
            recipe: the casts.
            scaling: counts non-finite elements.
            learning: whether the weight takes a gradient.
            memory: of a DTensor ``source``, the plain tensor of its values; None where ``source`` is plain itself.
        """
        memory = source if memory is None else memory
        last = self._shared_cast(source, x, recipe, scaling, learning=learning, memory=memory)
        if last is None or not learning or recipe.grad_weight.b is not None:
            return None if last is None else last.operands
        return InputOperands(last.operands.output, _rows(x).t())

    def gathered(
        self,
        source: Tensor,
        x: Tensor,
        recipe: Recipe,
        scaling: OperandScaling,
        gather: RowGather,
        *,
        learning: bool,
        memory: Tensor,
    ) -> tuple[Tensor, InputOperands] | None:
        """A stand-in for the whole of an input that ranks divide, and its operands, which all layers share.

        Args:
            source: a layer's input, a DTensor.
            x: this rank's part of it, in the dtype of ``torch.autocast``.
            recipe: the casts.
            scaling: counts non-finite elements; of slices.
            gather: gathers the codes.
            learning: whether the weight takes a gradient.
            memory: this rank's part of ``source``.
        """
        last = self._shared_cast(source, x, recipe, scaling, learning=learning, memory=memory, gather=gather)
        if last is None:
            return None
        if last.stand_in is None:
            last.stand_in = gather.stand_in(memory, x.dtype)
        return last.stand_in, last.operands

    def _shared_cast(
        self,
        source: Tensor,
        x: Tensor,
        recipe: Recipe,
        scaling: OperandScaling,
        *,
        learning: bool,
        memory: Tensor,
        gather: RowGather | None = None,
    ) -> _SharedCast | None:
        if not _is_shared(source, memory, recipe):
            return None
        key = (*_state(memory), x.dtype, recipe.output.a, recipe.grad_weight.b, gather)
        last = self._last
        if last is None or last.source() is not source or last.key != key or (learning and not last.learning):
            nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
            own = OperandScaling(nonfinite=nonfinite, slices=scaling.slices)
            cast = cast_input if gather is None else gather.operands
            operands = cast(_rows(x), recipe, own, learning=learning)
            if recipe.grad_weight.b is None:
                operands = InputOperands(operands.output)
            last = self._last = _SharedCast(weakref.ref(source, self._forget), key, operands, nonfinite, learning)
        counts = scaling.take().nonfinite
        if counts is not None and not inside_backward():  # activation checkpointing counted in the first run
            counts.add_(last.nonfinite)
        return last

    def _forget(self, source: "weakref.ref[Tensor]") -> None:
        if self._last is not None and self._last.source is source:
            self._last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedInput":
        return SharedInput()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInput, ()


def _rows(x: Tensor) -> Tensor:
    """The matrix of an input, as its layer casts it."""
    rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows.float() if rows.dtype is torch.float64 else rows


def _is_shared(source: Tensor, memory: Tensor, recipe: Recipe) -> bool:
    """Return whether layers of this recipe may share an input's cast."""
    spec, transposed_spec = recipe.output.a, recipe.grad_weight.b
    if (
        spec is None
        or recipe.is_delayed
        or any(each.scaling != Scaling.DYNAMIC for each in (spec, transposed_spec or spec))
    ):
        return False
    if source.is_leaf or not (torch.is_grad_enabled() and source.requires_grad) or is_traced(memory):
        return False
    return not (source.is_cuda and torch.cuda.is_current_stream_capturing())  # a replay must cast anew


def _state(x: Tensor) -> tuple[object, ...]:
    """Key that changes when a tensor is written to or given other data; includes the stream of its codes."""
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    return (x._version, x.data_ptr(), x.dtype, x.shape, x.stride(), stream)  # noqa: SLF001
