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
from octavo.recipes import Recipe, Scaling
from octavo.scaling import OperandScaling, inside_backward

__all__ = ["SharedInput"]


@dataclass(frozen=True, slots=True)
class _SharedCast:
    """A cast of an input.

    Attributes:
        source: the input, which this does not keep alive.
        key: the state that the input was in, and how it was cast.
        operands: the result; without a transpose that is the input itself.
        nonfinite: int64 [], number of the input's NaN and ±Inf elements.
        learning: whether ``operands`` serve grad_weight too.
    """

    source: "weakref.ref[Tensor]"
    key: tuple[object, ...]
    operands: InputOperands
    nonfinite: Tensor
    learning: bool


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
        if not _is_shared(source, memory, recipe):
            return None
        rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
        rows = rows.float() if rows.dtype is torch.float64 else rows
        key = (*_state(memory), x.dtype, recipe.output.a, recipe.grad_weight.b)
        last = self._last
        if last is None or last.source() is not source or last.key != key or (learning and not last.learning):
            last = self._last = self._cast(source, rows, recipe, key, learning=learning)
        counts = scaling.take().nonfinite
        if counts is not None and not inside_backward():  # activation checkpointing counted in the first run
            counts.add_(last.nonfinite)
        if learning and recipe.grad_weight.b is None:
            return InputOperands(last.operands.output, rows.t())
        return last.operands

    def _cast(
        self, source: Tensor, rows: Tensor, recipe: Recipe, key: tuple[object, ...], *, learning: bool
    ) -> _SharedCast:
        nonfinite = torch.zeros((), dtype=torch.int64, device=rows.device)
        operands = cast_input(rows, recipe, OperandScaling(nonfinite=nonfinite), learning=learning)
        if recipe.grad_weight.b is None:
            operands = InputOperands(operands.output)
        return _SharedCast(weakref.ref(source, self._forget), key, operands, nonfinite, learning)

    def _forget(self, source: "weakref.ref[Tensor]") -> None:
        if self._last is not None and self._last.source is source:
            self._last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedInput":
        return SharedInput()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInput, ()


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
