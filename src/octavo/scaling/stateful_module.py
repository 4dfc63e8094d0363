"""Module whose state follows it from device to device, and is no part of its ``state_dict``."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

__all__ = ["StatefulModule"]


class StatefulModule(torch.nn.Module):
    """A module with buffers that are no part of its ``state_dict``.

    They follow the model to its device but not to its dtype. What lies on the ``meta`` device has no values: it starts
    anew when the model is moved, by ``to_empty`` as by ``to``, and ``to_empty`` keeps the values of the others.
    """

    def fresh_state(self, device: torch.device | None) -> dict[str, Tensor]:
        """Return the buffers' initial values by name."""
        raise NotImplementedError

    def start_state(self, device: torch.device | None) -> None:
        """Register the buffers with their initial values; also in inference mode as tensors that training may write."""
        with torch.inference_mode(False):  # dynamo takes no keyword here
            for name, tensor in self.fresh_state(device).items():
                self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        state = self.fresh_state(torch.device("cpu"))
        for name in state:
            known = self._buffers[name]
            assert known is not None
            if not known.is_meta:
                state[name] = known
        self._buffers.update(state)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in state.items():
            moved = self._buffers[name]
            assert moved is not None
            self._buffers[name] = tensor.to(moved.device)
        return self
