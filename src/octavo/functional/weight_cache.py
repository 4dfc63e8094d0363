"""Sources of a weight's operands that are cast already.

One is a cache: micro-batches of a step cast a weight once, and a changed weight is cast again. Another is the gather of
a weight that ranks share (octavo.parallel).
"""

from typing import Protocol

import torch
from torch import Tensor

from octavo.functional.saved_operands import WeightOperands
from octavo.numerics.cast import is_eager_cpu
from octavo.recipes import Recipe
from octavo.scaling import OperandScaling
from octavo.scaling.scale_updates import OptimizerSteps

__all__ = ["OperandSource", "WeightCache"]


class OperandSource(Protocol):
    """Source of the operands of a weight whose codes a layer gets from elsewhere, such as from other ranks."""

    def operands(self, recipe: Recipe, scaling: OperandScaling) -> WeightOperands:
        """Return the weight's operands under ``recipe``; ``scaling`` is for casts that the call makes itself."""
        ...

    def clear(self) -> None:
        """Forget what is known of the weight's values."""
        ...


class WeightCache:
    """Cache of a weight's operands until the weight changes, so that micro-batches of a step cast it once.

    Autograd's version counter alone misses changes: fused optimizers do not raise it, nor do writes through
    ``weight.data``. An eager CPU weight is therefore also recognised by the sums of its bits over every row and every
    column, a tenth of the cost of casting it; a change that leaves all of them as they were is not seen. Other devices
    would have to wait for such sums; there a step of any ``torch.optim`` optimizer counts as a change, and after other
    writes ``octavo.update_scales(model)`` empties the cache.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._content = torch.empty(0, device="cpu")
        self._operands: WeightOperands | None = None
        OptimizerSteps.watch()

    def operands(
        self, weight: Tensor, recipe: Recipe, scaling: OperandScaling, *, learning: bool
    ) -> WeightOperands | None:
        """The weight's operands under ``recipe``; None where they are neither cached nor to be cached.

        Evaluation caches none for a delayed recipe, since it records no amax, nor in inference mode, since
        autograd refuses its tensors later. ``scaling`` records a cast.
        """
        if weight.is_inference():
            return None
        key = (weight.data_ptr(), weight._version, weight.dtype, recipe, OptimizerSteps.count)  # noqa: SLF001
        summed = is_eager_cpu(weight) and scaling.slices is None  # all ranks must cast a shared weight together
        content = _sums_of_bits(weight.detach()) if summed else self._content
        if self._operands is not None and self._key == key and torch.equal(self._content, content):
            return self._operands
        if torch.is_inference_mode_enabled() or (recipe.is_delayed and not learning):
            return None
        self._key, self._content = key, content
        self._operands = WeightOperands(weight.detach(), recipe, scaling)
        return self._operands

    def clear(self) -> None:
        """Forget the operands."""
        self._operands = None


def _sums_of_bits(weight: Tensor) -> Tensor:
    """Sums of the bits of a matrix, as integers modulo 2^64, over its columns and over its rows: int64 [K' + N]."""
    wide = 8 // weight.itemsize
    aligned = weight.is_contiguous() and weight.shape[1] % wide == 0 and weight.storage_offset() % wide == 0
    words = weight.view(torch.int64 if aligned else _BITS[weight.itemsize])
    return torch.cat([words.sum(0), words.sum(1)])


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
