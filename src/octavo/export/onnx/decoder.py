"""octavo's Llama as one forward that exports well: rotary tables of half a head, attention in four products, a cache.

| input                    | shape                | output                  | shape                    |
|--------------------------|----------------------|-------------------------|--------------------------|
| input_ids                | [B, T] int64         | logits                  | [B, T, V]                |
| past_key_values.N.key    | [B, kv heads, P, D]  | present.N.key           | [B, kv heads, P + T, D]  |
| past_key_values.N.value  | [B, kv heads, P, D]  | present.N.value         | [B, kv heads, P + T, D]  |

The cache is optional; P may be 0. Keys have their rotary positions. There is no padding: a batch's rows are of one
length, and the T tokens stand at positions P, P + 1, ….

Attention may have its four operands as codes too. Its graph is then the one that TensorRT fuses: queries are scaled and
keys transposed before they are cast, and probabilities, which lie in [0, 1], have the scale 1/448.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.export.onnx.layers import StaticCast, narrowed_scale
from octavo.export.onnx.operators import in_dtype
from octavo.formats import E4M3
from octavo.models import Llama
from octavo.numerics import encode_scale_from_amax

__all__ = ["CacheNames", "GraphDecoder", "attention_casts"]

OPERANDS = ("queries", "keys", "probabilities", "values")


class GraphDecoder(nn.Module):
    """A Llama that takes and gives its cache as plain tensors.

    Args:
        model: its linears may be :class:`GraphLinear`.
        has_cache: whether there are inputs and outputs for it.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Llama, *, has_cache: bool) -> None:
        super().__init__()
        self.config, self.has_cache = model.config, has_cache
        self.embed_tokens, self.norm, self.lm_head = model.model.embed_tokens, model.model.norm, model.lm_head
        self.layers = model.model.layers
        half = model.config.head_dim // 2  # the angles stand twice in the model's tables
        self.register_buffer("cos", model.model.cos[:, :half].clone())
        self.register_buffer("sin", model.model.sin[:, :half].clone())
        self.attention_casts: nn.ModuleList | None = None

    def forward(self, input_ids: Tensor, *past: Tensor) -> Tensor | tuple[Tensor, ...]:
        """See the module's table; ``past`` is key and value of the first layer, of the second, …, or nothing."""
        known = past[0].shape[2] if past else 0
        at = torch.arange(input_ids.shape[1], device=input_ids.device) + known
        angles = self.cos.index_select(0, at), self.sin.index_select(0, at)
        key_at = torch.arange(input_ids.shape[1] + known, device=input_ids.device)
        unseen = key_at > at[:, None]
        hidden, present = self.embed_tokens(input_ids), []
        layers: Any = self.layers
        for index, layer in enumerate(layers):
            cached = past[2 * index : 2 * index + 2]
            attended, keys, values = self._attention(index, layer.input_layernorm(hidden), angles, unseen, cached)
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            present += [keys, values]
        logits: Any = self.lm_head(self.norm(hidden))
        return (logits, *present) if self.has_cache else logits

    def _attention(
        self, index: int, hidden: Tensor, angles: tuple[Tensor, Tensor], unseen: Tensor, cached: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention's result [B, T, H], and all keys and values [B, kv, P + T, D]."""
        layer: Any = self.layers[index]
        own = layer.self_attn
        queries = _turned(self._heads(own.q_proj(hidden), own.num_heads), angles)
        keys = _turned(self._heads(own.k_proj(hidden), own.num_kv_heads), angles)
        values = self._heads(own.v_proj(hidden), own.num_kv_heads)
        if cached:
            keys, values = torch.cat([cached[0], keys], 2), torch.cat([cached[1], values], 2)
        mixed = self._mixed(index, queries, (keys, values), unseen)
        out: Tensor = own.o_proj(mixed.transpose(1, 2).flatten(2))
        return out, keys, values

    def _heads(self, projected: Tensor, heads: int) -> Tensor:
        split: Tensor = projected.unflatten(-1, (heads, self.config.head_dim))
        return split.transpose(1, 2)

    def _mixed(self, index: int, queries: Tensor, known: tuple[Tensor, Tensor], unseen: Tensor) -> Tensor:
        """softmax(Q K^T / sqrt(D)) V, [B, heads, T, D], of queries that do not see the keys ``unseen`` [T, P + T]."""
        keys, values = known
        group = self.config.num_heads // self.config.num_kv_heads
        queries = queries * (1 / math.sqrt(self.config.head_dim))
        keys_t, values = _repeated(keys, group).transpose(2, 3), _repeated(values, group)
        scores = self._cast(index, 0, queries) @ self._cast(index, 1, keys_t)
        probabilities = scores.masked_fill(unseen, -math.inf).softmax(-1)
        return self._cast(index, 2, probabilities) @ self._cast(index, 3, values)

    def _cast(self, index: int, operand: int, x: Tensor) -> Tensor:
        if self.attention_casts is None:
            return x
        casts: Any = self.attention_casts[index]
        decoded: Tensor = casts[operand](x)[0]
        return decoded


def _turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """``octavo.nn.rotate`` of [B, heads, T, D], by tables of half the width."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return in_dtype(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1), x.dtype)


def _repeated(x: Tensor, group: int) -> Tensor:
    """[B, kv, S, D] with every head ``group`` times side by side."""
    if group == 1:
        return x
    return x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


class CacheNames:
    """What a cache's tensors are called, layer by layer."""

    @staticmethod
    def past(layers: int) -> Iterator[str]:
        """Of the inputs."""
        return (f"past_key_values.{layer}.{role}" for layer in range(layers) for role in ("key", "value"))

    @staticmethod
    def present(layers: int) -> Iterator[str]:
        """Of the outputs."""
        return (f"present.{layer}.{role}" for layer in range(layers) for role in ("key", "value"))


@torch.no_grad()
def attention_casts(decoder: GraphDecoder, tokens: Tensor, dtype: torch.dtype) -> nn.ModuleList:
    """Casts of every layer's queries, keys, probabilities and values, by the amaxes that ``tokens`` [B, T] show.

    Queries are measured with 1 / sqrt(D) in them, keys with their rotary positions. Probabilities have the scale 1/448.
    """
    amaxes = [[torch.zeros(()) for _ in OPERANDS] for _ in decoder.layers]
    decoder.attention_casts = nn.ModuleList(
        nn.ModuleList(_Look(found, operand) for operand in range(len(OPERANDS))) for found in amaxes
    )
    decoder(tokens)
    decoder.attention_casts = None
    made = []
    for index, found in enumerate(amaxes):
        found[OPERANDS.index("probabilities")] = torch.ones(())
        encoded = [encode_scale_from_amax(amax, E4M3) for amax in found]
        names = [f"the {name} of layer {index}" for name in OPERANDS]
        casts = [
            StaticCast(encode, narrowed_scale(encode.reciprocal(), dtype, name))
            for encode, name in zip(encoded, names, strict=True)
        ]
        made.append(nn.ModuleList(casts))
    return nn.ModuleList(made)


class _Look(nn.Module):
    """Stands where a cast will stand, and notes the largest magnitude."""

    def __init__(self, amaxes: list[Tensor], operand: int) -> None:
        super().__init__()
        self.amaxes, self.operand = amaxes, operand

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        self.amaxes[self.operand] = torch.maximum(self.amaxes[self.operand], x.abs().amax().float())
        return x, None
