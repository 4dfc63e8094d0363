"""Reference of the native kernels: ``Llama.forward`` over a paged cache, in torch operations.

Weights and input casts are those of octavo.inference.decoder_weights; all other operations are FP32. Keys and values
are rounded to the cache's format before attention, including those of the query's own position.

Subtracting a vector m from all keys of a head, such as their mean, changes only their rounding:

    softmax_s(q · (k_s − m)) = softmax_s(q · k_s − q · m) = softmax_s(q · k_s)      q · m is the same for all s
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.inference.decoder_weights import DecoderWeight, InputCast, Saturation
from octavo.inference.kv_cache import PagedKVCache
from octavo.inference.native_decoder import DecoderTensors
from octavo.kernels import quantize
from octavo.models import Llama, LlamaConfig
from octavo.models.llama import mlps_of
from octavo.numerics import PerBlock, PerRow
from octavo.numerics.integers import quantize_int8
from octavo.numerics.metrics import saturation_limit

__all__ = ["ReferenceDecoder", "attend", "linear"]


class ReferenceDecoder:
    """Llama whose linear layers use a decoder's dequantized weights.

    Args:
        config: shape of the model.
        decoder: tensors of the decoder; references to them are kept.
        embed: function from tokens, int64 [R], to float32 rows [R, hidden].
    """

    def __init__(self, config: LlamaConfig, decoder: DecoderTensors, embed: Callable[[Tensor], Tensor]) -> None:
        self._decoder = decoder
        with torch.device("meta"):
            self._model = cast("Any", Llama(config))  # whose layers are replaced by modules of other classes
        body, saturation = self._model.model, decoder.saturation
        body.embed_tokens, self._model.lm_head = _Embedding(embed), _Linear(decoder.head, saturation)
        body.cos, body.sin, body.norm.weight = decoder.cos, decoder.sin, _fixed(decoder.norm)
        heads = (config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2)
        for layer, tensors in zip(body.layers, decoder.layers, strict=True):
            attention = layer.self_attn
            layer.input_layernorm.weight, layer.post_attention_layernorm.weight = map(
                _fixed, (tensors.attention_norm, tensors.mlp_norm)
            )
            attention.q_proj, attention.k_proj, attention.v_proj = _parts(tensors.qkv, heads, saturation)
            attention.o_proj = _Linear(tensors.out, saturation)
            if tensors.qk_norms is not None:
                attention.q_norm.weight, attention.k_norm.weight = map(_fixed, tensors.qk_norms)
            if tensors.router is not None:
                layer.mlp.gate.weight = _fixed(tensors.router)
            if tensors.shared_gate is not None:
                layer.mlp.shared_expert_gate.weight = _fixed(tensors.shared_gate[None])
            mlps: list[Any] = [*mlps_of(layer)]
            for mlp, weights in zip(mlps, tensors.mlps, strict=True):
                mlp.gate_proj, mlp.up_proj = _parts(weights.gate_up, [weights.down.shape[1]] * 2, saturation)
                mlp.down_proj = _Linear(weights.down, saturation)

    def run(self, tokens: Tensor, cache: PagedKVCache, start: int, *, every: bool = False) -> Tensor:
        """Read the next tokens and add their keys and values to the cache.

        Args:
            tokens: int64 [R].
            cache: cache of the sequence.
            start: position of the first token.
            every: return the logits after every token instead of the last.

        Returns:
            float32 [R, V], or [1, V].
        """
        hidden = self._model.model(tokens[None], _PagedAttention(self._decoder, cache, start))[0]
        logits: Tensor = self._model.lm_head(hidden if every else hidden[-1:])
        return logits


class _PagedAttention:
    """Adapter of a paged cache of one sequence to :class:`octavo.models.llama.DecoderCache`."""

    def __init__(self, decoder: DecoderTensors, cache: PagedKVCache, start: int) -> None:
        self._decoder, self._cache, self.length = decoder, cache, start

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        end = self.length + queries.shape[1]
        position = torch.arange(self.length, end, device=queries.device)
        self._cache.store(layer, position, keys[0] - self._decoder.layers[layer].key_mean, values[0])
        stored = self._cache.read(layer, end)
        return attend(queries[0], *stored, position, self._decoder.attention_scale)[None]


class _Embedding(nn.Module):
    def __init__(self, embed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._embed = embed

    def forward(self, tokens: Tensor) -> Tensor:
        rows: Tensor = self._embed(tokens.flatten()).unflatten(0, tokens.shape)
        return rows


class _Linear(nn.Module):
    def __init__(self, weight: DecoderWeight, saturation: Saturation) -> None:
        super().__init__()
        self._weight, self._saturation = weight, saturation

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = linear(x.flatten(0, -2), self._weight, self._saturation).unflatten(0, x.shape[:-1])
        return rows


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _parts(weight: DecoderWeight, sizes: Sequence[int], saturation: Saturation) -> list[_Linear]:
    """Layers that share an input, whose saturation counts once, since the kernels cast it once."""
    ends = [0, *accumulate(sizes)]
    counted = [saturation, *(Saturation() for _ in sizes[1:])]
    return [
        _Linear(weight.part(slice(first, last)), counts)
        for first, last, counts in zip(ends, ends[1:], counted, strict=False)
    ]


def attend(queries: Tensor, keys: Tensor, values: Tensor, position: Tensor, scale: float) -> Tensor:
    """Compute ``softmax(queries · keysᵀ · scale) · values``, each row over the positions up to its own.

    Args:
        queries: [R, heads, D].
        keys: [S, kv heads, D].
        values: [S, kv heads, D].
        position: [R], position of each query.
        scale: factor of the scores.
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("rhd,shd->hrs", queries, keys) * scale
    hidden = torch.arange(keys.shape[0], device=keys.device) > position[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hrs,shd->rhd", weights, values)


def linear(x: Tensor, weight: DecoderWeight, saturation: Saturation) -> Tensor:
    """Compute ``cast(x) @ weight.T + bias`` in FP32.

    Args:
        x: [R, K].
        weight: weight and the cast of its input.
        saturation: updated by a static cast.
    """
    return F.linear(_cast(x, weight, saturation), weight.dequantize(), weight.bias)


def _cast(x: Tensor, weight: DecoderWeight, saturation: Saturation) -> Tensor:
    if weight.input is InputCast.INT8_DYNAMIC:
        return quantize_int8(x).dequantize()
    if weight.input is InputCast.E4M3_DYNAMIC:
        return quantize(x, E4M3, granularity=PerBlock(1, weight.block) if weight.block else PerRow()).dequantize()
    if weight.input is InputCast.E4M3_STATIC:
        codes = quantize(x, E4M3, scale=weight.input_scale)
        saturation.elements += x.numel()
        saturation.saturated += int(((x.double().abs() > saturation_limit(codes)) & x.isfinite()).sum())
        return codes.dequantize()
    return x
