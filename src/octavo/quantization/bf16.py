"""The BF16 model: what every format is compared with, and what every format is made from.

    weights        every parameter rounded to BF16 and no other: what a BF16 checkpoint holds, norms and biases included
    around them    BF16 autocast: linear layers multiply BF16 values, what runs between them stays FP32

FP8 and INT8 codes are made of the rounded weights too, because a checkpoint is what they would be made of. Rounding
twice is not rounding once: made of the FP32 weights, some codes would be others, and a comparison would credit a format
with digits that the reference was never given. ``octavo eval --compare`` and ``octavo sensitivity`` both start here.
"""

import torch
from torch import nn

__all__ = ["bf16_autocast", "round_to_bf16"]


def round_to_bf16(model: nn.Module) -> None:
    """Round every parameter to the nearest BF16 value, ties to even, in place; dtypes and sharing stay.

    FP8 codes, which are no values, stay as they are.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> layer.weight.data.fill_(1 + 2**-9), round_to_bf16(layer), layer.weight.item()
        (tensor([[1.0020]]), None, 1.0)
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)


def bf16_autocast(device: torch.device) -> torch.autocast:
    """What the rounded model runs in."""
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
