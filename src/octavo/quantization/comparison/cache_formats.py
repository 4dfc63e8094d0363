"""Keys and values as an FP8 cache holds them: what the scale of each vector is worth, and what keys have in common.

A cache keeps a key and a value of D numbers for every position, layer and head: E4M3 codes and one scale a vector.

| format       | scale of a vector                                                      | bytes a vector, D = 64 |
|--------------|------------------------------------------------------------------------|------------------------|
| power-of-two | the smallest power of two that keeps it within 448                     | 65 (BF16: 128)         |
| searched     | of 16 BF16 numbers from amax / 448 to nearly twice that, the one with  | 66                     |
|              | the least squared error                                                |                        |
| centred      | searched; a key is kept less the mean of its layer's and head's keys   | 66                     |

All have the same 3 mantissa bits for every number. What the search wins: a code's error depends on where its number
falls between two neighbours of the grid, and the scale moves all numbers of a vector along it. A key has few large
numbers, and there is a scale that puts just those close to the grid.

What the mean wins: rotary pairs that turn slowly hold a nearly constant part, up to two thirds of a key's energy, and
its rounding errors are as large as it is. Subtracting a vector m from all keys of a head changes nothing:

    softmax_s(q · (k_s − m)) = softmax_s(q · k_s − q · m) = softmax_s(q · k_s)      q · m is the same for all s

so it is never added back, and reading costs what it did (SageAttention, arXiv 2410.02367, smooths keys so). The means
come from other text, by :func:`key_means`.

``octavo.serving`` keeps power-of-two scales today; the others are measured here and have no kernel yet.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import E4M3, E8M0
from octavo.kernels import quantize
from octavo.language_model import KeysAndValues, LanguageModel
from octavo.numerics import PerRow, ScaleRounding

__all__ = ["CASTS", "cached", "key_means", "power_of_two_scales", "searched_scales", "vector_bytes"]

CANDIDATES = 16  # more win nothing that could be measured
Cast = Callable[[Tensor], Tensor]


def power_of_two_scales(vectors: Tensor) -> Tensor:
    """Vectors [..., D], float32, as codes with power-of-two scales decode; exactly what ``PagedKVCache`` reads back."""
    cast = quantize(
        vectors, E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL, scale_format=E8M0, amax_floor=0
    )
    return cast.dequantize()


def searched_scales(vectors: Tensor) -> Tensor:
    """Vectors [..., D], float32, as codes with the best of a binade's BF16 scales decode.

    Special values: a zero vector stays zero; NaN or infinity in a vector gives NaN in all of it.
    """
    tightest = vectors.abs().amax(-1, keepdim=True) / E4M3.max
    tightest = torch.where(tightest > 0, tightest, 1.0)
    best = least = None
    for step in range(CANDIDATES):
        scale = (tightest * (1 + step / CANDIDATES)).to(torch.bfloat16).float()
        decoded = quantize(vectors, E4M3, granularity=PerRow(), scale=scale).dequantize()
        error = (decoded - vectors).square().sum(-1, keepdim=True)
        if best is None or least is None:
            best, least = decoded, error
            continue
        best = torch.where(error < least, decoded, best)
        least = torch.minimum(error, least)
    assert best is not None
    return best


CASTS: Mapping[str, Cast] = MappingProxyType(
    {"power-of-two": power_of_two_scales, "searched": searched_scales, "centred": searched_scales}
)
SCALE_BYTES = MappingProxyType({"power-of-two": 1, "searched": 2, "centred": 2})


def vector_bytes(name: str, head_dim: int) -> int:
    """Bytes of a key or value of one head; in BF16 it takes ``2 * head_dim``.

    Example:
        >>> vector_bytes("searched", 64) / (2 * 64)
        0.515625
    """
    return head_dim + SCALE_BYTES[name]


@torch.no_grad()
def key_means(model: LanguageModel, windows: Tensor) -> dict[int, Tensor]:
    """The mean of each layer's keys, rotary positions included, [kv heads, D], over windows [count, length]."""
    sums: dict[int, Tensor] = {}

    def add(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        sums[layer] = sums.get(layer, 0) + keys.double().sum(dim=(0, 1))
        return keys, values

    with model.keys_and_values_through(add) as logits:
        for window in windows:
            logits(window[None])
    return {layer: (total / windows.numel()).float() for layer, total in sums.items()}


def cached(name: str, means: Mapping[int, Tensor] | None = None) -> KeysAndValues:
    """What attention reads of keys and values that were stored, for ``LanguageModel.keys_and_values_through``.

    Args:
        name: of the format.
        means: of :func:`key_means`, for "centred".

    Raises:
        ConfigError: an unknown format, or "centred" without means and the reverse.
    """
    if name not in CASTS:
        raise ConfigError(f"there is no cache format {name!r}; use one of {', '.join(CASTS)}")
    if (name == "centred") != (means is not None):
        raise ConfigError("a cache has the means of its keys if it is centred, and no other")
    cast = CASTS[name]

    def through(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = keys.float() if means is None else keys.float() - means[layer]
        return cast(stored).to(keys.dtype), cast(values.float()).to(values.dtype)

    return through
