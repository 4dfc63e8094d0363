"""What octavo's layers record, wherever a layer keeps it."""

import torch
from torch import Tensor

from octavo.nn import Linear


def recorded_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Buffers and histories by name: the tensors themselves."""
    found = dict(model.named_buffers())
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and layer.amax_history is not None:
            found |= {f"{path}.amax_history.{name}": buffer for name, buffer in layer.amax_history.named_buffers()}
    return found


def end_step() -> None:
    """An optimizer's step that changes no weight: it ends the steps of models that have no optimizer of their own."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step()
