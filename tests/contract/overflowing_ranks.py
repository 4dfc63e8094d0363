"""Two steps of a layer whose second rank meets an infinity in the second one."""

from collections.abc import Sequence

import torch
from torch import Tensor

import octavo


def overflow_state(ranks: Sequence[int]) -> dict[str, Tensor]:
    """The scaling state after two steps, of a micro-batch for each of ``ranks``."""
    torch.manual_seed(3)
    layer = octavo.nn.Linear(8, 4, recipe="article")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)  # gradients are not averaged
    for step in range(2):
        for rank in ranks:
            layer(overflowing(rank, step)).sum().backward()
        optimizer.step()
    return octavo.scaling_state(layer)


def overflowing(rank: int, step: int) -> Tensor:
    x = torch.full((2, 8), 1.0 + rank + step)
    if rank and step:
        x[1, 3] = torch.inf
    return x
