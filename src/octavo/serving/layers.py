"""What a decoder layer computes over a cache, in torch's operations: the definition that the native kernels follow.

Weights are E4M3 codes with one scale a row; everything between them is FP32. Keys and values go through the cache
before any query sees them, its own position's too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.decoding import DecoderLayer, DecoderShape
from octavo.nn import rotate
from octavo.numerics import QuantizedTensor
from octavo.serving.kv_cache import PagedKVCache

__all__ = ["Decoder", "attend", "linear"]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder's layers and what they share.

    Attributes:
        shape: their sizes.
        layers: their tensors.
        cos: float32 [positions, D], cosines of the rotary angles.
        sin: their sines.
    """

    shape: DecoderShape
    layers: Sequence[DecoderLayer]
    cos: Tensor
    sin: Tensor

    def run(self, hidden: Tensor, cache: PagedKVCache, position: Tensor) -> None:
        """Pass rows of the residual stream through all layers, in place, and append their keys and values.

        Args:
            hidden: float32 [R, hidden], one row a position.
            cache: takes the keys and values.
            position: of every row, int64 [R], ascending: those that follow the cache's.
        """
        for index, layer in enumerate(self.layers):
            hidden += self._attention(index, hidden, cache, position)
            normed = F.rms_norm(hidden, (self.shape.hidden_size,), layer.mlp_norm, self.shape.norm_eps)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden += linear(F.silu(gate) * up, layer.down)

    def _attention(self, index: int, hidden: Tensor, cache: PagedKVCache, position: Tensor) -> Tensor:
        shape, layer = self.shape, self.layers[index]
        normed = F.rms_norm(hidden, (shape.hidden_size,), layer.attention_norm, shape.norm_eps)
        heads = linear(normed, layer.qkv).unflatten(-1, (-1, shape.head_dim))
        queries, keys, values = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=-2)
        queries, keys = (rotate(x[None], self.cos[position], self.sin[position])[0] for x in (queries, keys))
        cache.store(index, position, keys, values)
        seen = cache.read(index, int(position[-1]) + 1)
        return linear(attend(queries, *seen, position, shape.attention_scale).flatten(1), layer.out)


def attend(queries: Tensor, keys: Tensor, values: Tensor, position: Tensor, scale: float) -> Tensor:
    """``softmax(queries · keysᵀ · scale) · values``, a row seeing the positions up to its own.

    Args:
        queries: [R, heads, D].
        keys: [S, kv heads, D].
        values: the same.
        position: of every query.
        scale: of the scores.
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("rhd,shd->hrs", queries, keys) * scale
    hidden = torch.arange(keys.shape[0]) > position[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hrs,shd->rhd", weights, values)


def linear(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """``x @ weight.T`` in FP32."""
    return F.linear(x, weight.dequantize().float())
