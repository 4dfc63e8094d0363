"""The BF16 model: what every format is compared with, and what every format is made from.

    weights        every parameter rounded to BF16 and no other: what a BF16 checkpoint holds, norms and biases included
    around them    BF16 autocast: linear layers multiply BF16 values, what runs between them stays FP32

FP8 and INT8 codes are made of the rounded weights too, because a checkpoint is what they would be made of. Rounding
twice is not rounding once: made of the FP32 weights, some codes would be others, and a comparison would credit a format
with digits that the reference was never given. ``octavo eval --compare`` and ``octavo sensitivity`` both start here.
"""

import torch
from torch import nn

from octavo.errors import ConfigError

__all__ = ["bf16_autocast", "round_to_bf16"]


def round_to_bf16(model: nn.Module) -> None:
    """Round every parameter to the nearest BF16 value, ties to even, in place; dtypes and sharing stay.

    FP8 codes, which are no values, stay as they are.

    Raises:
        ConfigError: a parameter's largest value becomes infinite, as FP16's 65504 does: BF16's nearest is 65536. The
            model is left as it was.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> layer.weight.data.fill_(1 + 2**-9), round_to_bf16(layer), layer.weight.item()
        (tensor([[1.0020]]), None, 1.0)
    """
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1 and _overflows(parameter):
            raise ConfigError(
                f"parameter {path!r} has a value whose nearest in BF16 is infinite as {parameter.dtype}; load the "
                "model in FP32, or mend that value"
            )
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)


def _overflows(parameter: nn.Parameter) -> bool:
    """Whether a finite value becomes infinite: its largest does then."""
    if not parameter.numel():
        return False
    largest = parameter.detach().abs().amax()
    return bool(largest.isfinite() and largest.to(torch.bfloat16).to(parameter.dtype).isinf())


def bf16_autocast(device: torch.device) -> torch.autocast:
    """What the rounded model runs in."""
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
