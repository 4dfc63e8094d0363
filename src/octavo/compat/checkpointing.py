"""A model's scaling state as an object that checkpoint libraries save and load."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octavo.errors import CheckpointError
from octavo.nn.scaling_state import load_scaling_state, scaling_state
from octavo.recipes import Recipe

__all__ = ["ScalingState"]

_COUNT = "tensors"  # key of the number of tensors, which reveals a load that left some of them out

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class ScalingState:
    """``octavo.scaling_state`` and ``octavo.load_scaling_state`` by the names that checkpoint libraries call.

    - accelerate: ``accelerator.register_for_checkpointing(ScalingState(model))``.
    - ``torch.distributed.checkpoint``: ``{"model": ..., "scaling": ScalingState(model)}``. One rank's tensors are saved
      for all: steps that end on all ranks together leave the same on every rank, those of ``amax_group="rank"`` do not.
      A step that is over, but whose amaxes are not reduced yet, is left out with a warning, as by ``scaling_state``.

    Args:
        model: converted; may be wrapped later.
        recipe: of layers that are delayed only under ``octavo.autocast``; see ``octavo.load_scaling_state``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> _ = octavo.convert(model, "delayed")
        >>> saved = ScalingState(model).state_dict()
        >>> ScalingState(model).load_state_dict(saved)
    """

    def __init__(self, model: nn.Module, *, recipe: str | Recipe | None = None) -> None:
        self.model, self.recipe = model, recipe

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the scaling state's tensors, and their number."""
        state = scaling_state(self.model)
        return state | {_COUNT: torch.tensor(len(state))}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a :meth:`state_dict`.

        Raises:
            CheckpointError: it does not fit the model; nothing is loaded then.
        """
        state = dict(state_dict)
        saved = _count(state.pop(_COUNT, torch.tensor(len(state))))
        if saved != len(state):
            raise CheckpointError(
                f"the checkpoint holds {saved} tensors of scaling state and {len(state)} of them were loaded, those of "
                "the layers that have an amax history already; take one training step before loading, or convert the "
                "model with its delayed recipe"
            )
        load_scaling_state(self.model, state, recipe=self.recipe)


def _count(value: object) -> int:
    """Saved number of tensors, from a tensor of one whole number."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in INTEGERS:
        return int(value)
    raise CheckpointError(f"{_COUNT!r} must be a tensor of one whole number, not {value!r}; save the state again")
