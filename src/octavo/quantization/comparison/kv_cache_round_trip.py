"""Keys and values as the FP8 KV cache stores them, applied to the attention of a whole model.

``octavo.inference.PagedKVCache`` stores a key and a value of D elements for every position, layer and head: E4M3 codes
and, of sixteen candidate scales, the one with the least squared error (:mod:`octavo.numerics.scale_search`); D + 2
bytes instead of 2 D. The mean of a head's keys may be subtracted first: softmax is invariant to it
(octavo.inference.reference). The mean is taken from other text.

The mean helps because slowly rotating rotary pairs have a nearly constant component, up to two thirds of a key's
energy, with proportional rounding errors (SageAttention, arXiv 2410.02367, smooths keys the same way).
"""

from collections.abc import Mapping

from torch import Tensor

from octavo.formats import BF16, E4M3
from octavo.kernels import quantize
from octavo.language_model import KVTransform, LanguageModel
from octavo.numerics import PerRow
from octavo.numerics.scale_search import searched_scale
from octavo.quantization.calibration.observers import observe

__all__ = ["as_cached", "cached", "key_means", "vector_bytes"]


def as_cached(vectors: Tensor) -> Tensor:
    """Vectors [..., D], float32, after a round trip through ``PagedKVCache``'s format.

    Special values: a zero vector stays zero; NaN and ±Inf become NaN without changing the rest of their vector.
    """
    return quantize(vectors, E4M3, granularity=PerRow(), scale=searched_scale(vectors)).dequantize()


def vector_bytes(head_dim: int) -> int:
    """Bytes of one head's key or value; BF16 takes ``2 * head_dim``.

    Example:
        >>> vector_bytes(64) / (2 * 64)
        0.515625
    """
    return head_dim + BF16.torch_dtype.itemsize


def key_means(model: LanguageModel, windows: Tensor) -> dict[int, Tensor]:
    """Mean of each layer's keys after the rotary embedding, [kv heads, D], over windows [count, length]."""
    observation = observe(model, windows.split(1), {}, kv_cache=True)
    return {layer: statistics.key_mean for layer, statistics in observation.keys_and_values.items()}


def cached(means: Mapping[int, Tensor] | None = None) -> KVTransform:
    """Round trip through the cache, for ``LanguageModel.logits``.

    Args:
        means: mean keys by layer, subtracted before storing; None subtracts nothing.
    """

    def through(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = keys.float() if means is None else keys.float() - means[layer].to(keys.device)
        return as_cached(stored).to(keys.dtype), as_cached(values.float()).to(values.dtype)

    return through
