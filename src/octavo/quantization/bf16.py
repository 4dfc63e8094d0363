"""BF16 reference model: the baseline of every comparison, and the source of the weights that are quantized.

    weights        every parameter rounded to BF16, as in a BF16 checkpoint, norms and biases included
    computation    BF16 autocast: linear layers multiply BF16 values, operations between them stay FP32

FP8 and INT8 codes are also computed from the rounded weights, because they would be computed from a BF16 checkpoint.
Rounding twice is not rounding once: codes of the FP32 weights would partly differ, and a comparison would credit a
format with precision that the reference does not have. Used by ``octavo eval --compare`` and ``octavo sensitivity``.
"""

import torch
from torch import nn

from octavo.errors import ConfigError

__all__ = ["bf16_autocast", "round_to_bf16"]


def round_to_bf16(model: nn.Module) -> None:
    """Round every parameter to the nearest BF16 value, ties to even, in place; dtypes and sharing do not change.

    Tensors of FP8 codes are left alone.

    Raises:
        ConfigError: a finite parameter becomes infinite, such as FP16's 65504, whose nearest BF16 value is 65536. The
            model is not changed then.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> layer.weight.data.fill_(1 + 2**-9), round_to_bf16(layer), layer.weight.item()
        (tensor([[1.0020]]), None, 1.0)
    """
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1 and _overflows(parameter):
            raise ConfigError(
                f"parameter {path!r} has a value whose nearest BF16 value is infinite in {parameter.dtype}; load the "
                "model in FP32, or correct that value"
            )
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)


def _overflows(parameter: nn.Parameter) -> bool:
    """Report whether the largest magnitude is finite and becomes infinite in BF16."""
    if not parameter.numel():
        return False
    largest = parameter.detach().abs().amax()
    return bool(largest.isfinite() and largest.to(torch.bfloat16).to(parameter.dtype).isinf())


def bf16_autocast(device: torch.device) -> torch.autocast:
    """Autocast context of the BF16 reference."""
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
