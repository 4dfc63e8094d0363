"""Keys and values as generation's FP8 cache holds them, for the attention of a whole model.

``octavo.inference.PagedKVCache`` keeps a key and a value of D numbers for every position, layer and head: E4M3 codes
and, of sixteen scales, the one with the least squared error (:mod:`octavo.numerics.scale_search`); D + 2 bytes for 2 D.
A key may be kept less the mean of its layer's and head's keys, which softmax does not see (octavo.inference.reference),
and which comes from other text.

What the mean wins: rotary pairs that turn slowly hold a nearly constant part, up to two thirds of a key's energy, and
its rounding errors are as large as it is (SageAttention, arXiv 2410.02367, smooths keys so).
"""

from collections.abc import Mapping

from torch import Tensor

from octavo.formats import BF16, E4M3
from octavo.kernels import quantize
from octavo.language_model import KVTransform, LanguageModel
from octavo.numerics import PerRow
from octavo.numerics.scale_search import searched_scale
from octavo.quantization.calibration.observing import observe

__all__ = ["as_cached", "cached", "key_means", "vector_bytes"]


def as_cached(vectors: Tensor) -> Tensor:
    """Vectors [..., D], float32, as ``PagedKVCache`` reads them back.

    Special values: a zero vector stays zero; NaN and ±Inf become NaN, alone in their vector.
    """
    return quantize(vectors, E4M3, granularity=PerRow(), scale=searched_scale(vectors)).dequantize()


def vector_bytes(head_dim: int) -> int:
    """Bytes of a key or value of one head; in BF16 it takes ``2 * head_dim``.

    Example:
        >>> vector_bytes(64) / (2 * 64)
        0.515625
    """
    return head_dim + BF16.torch_dtype.itemsize


def key_means(model: LanguageModel, windows: Tensor) -> dict[int, Tensor]:
    """The mean of each layer's keys, rotary positions included, [kv heads, D], over windows [count, length]."""
    seen = observe(model, windows.split(1), {}, kv_cache=True)
    return {layer: each.key_mean for layer, each in seen.keys_and_values.items()}


def cached(means: Mapping[int, Tensor] | None = None) -> KVTransform:
    """What attention reads of keys and values that were stored, for ``LanguageModel.logits``.

    Args:
        means: of keys, subtracted before they are stored; None subtracts nothing.
    """

    def through(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = keys.float() if means is None else keys.float() - means[layer].to(keys.device)
        return as_cached(stored).to(keys.dtype), as_cached(values.float()).to(values.dtype)

    return through
