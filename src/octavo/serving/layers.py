"""What a decoder computes over a cache, in torch's operations: the definition that the kernels of CPUs and GPUs follow.

Weights are E4M3 codes with one scale a row; everything between them is FP32. Keys and values go through the cache
before any query sees them, its own position's too.

A vector m that is subtracted from all keys of a head, such as their mean, changes nothing but their rounding:

    softmax_s(q · (k_s − m)) = softmax_s(q · k_s − q · m) = softmax_s(q · k_s)      q · m is the same for all s
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.decoding import Decoder
from octavo.nn import rotate
from octavo.numerics import QuantizedTensor
from octavo.serving.kv_cache import PagedKVCache

__all__ = ["attend", "linear", "run"]


def run(decoder: Decoder, hidden: Tensor, cache: PagedKVCache, position: Tensor, *, every: bool = False) -> Tensor:
    """Read the next positions; their keys and values go into the cache.

    Args:
        decoder: what to run.
        hidden: float32 [R, hidden], the rows of the embedding; overwritten.
        cache: takes the keys and values.
        position: of every row, int64 [R], ascending: those that follow the cache's.
        every: logits of every row, or of the last.

    Returns:
        float32 [R, V], or [1, V].
    """
    for index, layer in enumerate(decoder.layers):
        hidden += _attention(decoder, index, hidden, cache, position)
        gate, up = linear(_norm(decoder, hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        hidden += linear(F.silu(gate) * up, layer.down)
    return linear(_norm(decoder, hidden if every else hidden[-1:], decoder.norm), decoder.head)


def _norm(decoder: Decoder, hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, (decoder.shape.hidden_size,), weight, decoder.shape.norm_eps)


def _attention(decoder: Decoder, index: int, hidden: Tensor, cache: PagedKVCache, position: Tensor) -> Tensor:
    shape, layer = decoder.shape, decoder.layers[index]
    heads = linear(_norm(decoder, hidden, layer.attention_norm), layer.qkv).unflatten(-1, (-1, shape.head_dim))
    queries, keys, values = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=-2)
    queries, keys = (rotate(x[None], decoder.cos[position], decoder.sin[position])[0] for x in (queries, keys))
    cache.store(index, position, keys - layer.key_mean, values)
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
    hidden = torch.arange(keys.shape[0], device=keys.device) > position[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hrs,shd->rhd", weights, values)


def linear(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """``x @ weight.T`` in FP32."""
    return F.linear(x, weight.dequantize().float())
