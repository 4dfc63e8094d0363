"""What a decoder computes over a cache, in torch's operations: the definition that the native kernels follow.

Weights and the casts of their inputs are those of octavo.inference.decoder_weights; everything between them is FP32.
Keys and values go through the cache before any query sees them, its own position's too.

A vector m that is subtracted from all keys of a head, such as their mean, changes nothing but their rounding:

    softmax_s(q · (k_s − m)) = softmax_s(q · k_s − q · m) = softmax_s(q · k_s)      q · m is the same for all s
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.formats import E4M3
from octavo.inference.decoder_weights import DecoderWeight, InputCast, Saturation
from octavo.inference.kv_cache import PagedKVCache
from octavo.inference.native_decoder import Decoder
from octavo.kernels import quantize
from octavo.nn import rotate
from octavo.numerics import PerRow
from octavo.numerics.integers import quantize_int8
from octavo.numerics.metrics import saturation_limit

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
        normed = _norm(decoder, hidden, layer.mlp_norm)
        gate, up = linear(normed, layer.gate_up, decoder.saturation).chunk(2, dim=-1)
        hidden += linear(F.silu(gate) * up, layer.down, decoder.saturation)
    normed = _norm(decoder, hidden if every else hidden[-1:], decoder.norm)
    return linear(normed, decoder.head, decoder.saturation)


def _norm(decoder: Decoder, hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, (decoder.shape.hidden_size,), weight, decoder.shape.norm_eps)


def _attention(decoder: Decoder, index: int, hidden: Tensor, cache: PagedKVCache, position: Tensor) -> Tensor:
    shape, layer = decoder.shape, decoder.layers[index]
    normed = _norm(decoder, hidden, layer.attention_norm)
    heads = linear(normed, layer.qkv, decoder.saturation).unflatten(-1, (-1, shape.head_dim))
    queries, keys, values = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=-2)
    queries, keys = (rotate(x[None], decoder.cos[position], decoder.sin[position])[0] for x in (queries, keys))
    cache.store(index, position, keys - layer.key_mean, values)
    seen = cache.read(index, int(position[-1]) + 1)
    found = attend(queries, *seen, position, shape.attention_scale).flatten(1)
    return linear(found, layer.out, decoder.saturation)


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


def linear(x: Tensor, weight: DecoderWeight, saturation: Saturation) -> Tensor:
    """``cast(x) @ weight.T + bias`` in FP32.

    Args:
        x: [R, K].
        weight: and how x is cast.
        saturation: what a static cast clips is added to it.
    """
    return F.linear(_cast(x, weight, saturation), weight.dequantize(), weight.bias)


def _cast(x: Tensor, weight: DecoderWeight, saturation: Saturation) -> Tensor:
    if weight.input is InputCast.INT8_DYNAMIC:
        return quantize_int8(x).dequantize()
    if weight.input is InputCast.E4M3_DYNAMIC:
        return quantize(x, E4M3, granularity=PerRow()).dequantize()
    if weight.input is InputCast.E4M3_STATIC:
        codes = quantize(x, E4M3, scale=weight.input_scale)
        saturation.elements += x.numel()
        saturation.saturated += int(((x.double().abs() > saturation_limit(codes)) & x.isfinite()).sum())
        return codes.dequantize()
    return x
