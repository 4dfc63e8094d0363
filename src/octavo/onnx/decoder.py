"""octavo's Llama as it is exported: ``Llama.forward`` over a cache of plain tensors, attention in two products.

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

from octavo.formats import E4M3
from octavo.models import Llama
from octavo.numerics import encode_scale_from_amax
from octavo.onnx.layers import StaticCast, narrowed_scale

__all__ = ["CacheNames", "GraphDecoder", "attention_casts", "exported_attention"]

OPERANDS = ("queries", "keys", "probabilities", "values")


class GraphDecoder(nn.Module):
    """A Llama that takes and gives its cache as plain tensors.

    Args:
        model: its linears may be :class:`GraphLinear`.
        has_cache: whether there are inputs and outputs for it.
    """

    def __init__(self, model: Llama, *, has_cache: bool) -> None:
        super().__init__()
        self.llama, self.has_cache = model, has_cache
        self.attention_casts: nn.ModuleList | None = None

    def forward(self, input_ids: Tensor, *past: Tensor) -> Tensor | tuple[Tensor, ...]:
        """See the module's table; ``past`` is key and value of the first layer, of the second, …, or nothing."""
        cache = _GraphCache(past, input_ids, self.attention_casts)
        logits: Tensor = self.llama.lm_head(self.llama.model(input_ids, cache))
        return (logits, *cache.present) if self.has_cache else logits


class _GraphCache:
    """Keys and values [B, kv, P, D] by layer, as :class:`octavo.models.llama.DecoderCache`."""

    def __init__(self, past: tuple[Tensor, ...], tokens: Tensor, casts: nn.ModuleList | None) -> None:
        self.length = past[0].shape[2] if past else 0
        self.present: list[Tensor] = []
        self._past, self._casts = past, casts
        at = torch.arange(tokens.shape[1], device=tokens.device) + self.length
        self._unseen = torch.arange(tokens.shape[1] + self.length, device=tokens.device) > at[:, None]  # [T, P + T]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        if self._past:
            past_keys, past_values = self._past[2 * layer : 2 * layer + 2]
            keys, values = torch.cat([past_keys, keys], 2), torch.cat([past_values, values], 2)
        self.present += [keys, values]
        casts: Any = None if self._casts is None else self._casts[layer]
        return exported_attention(queries, keys, values, self._unseen, casts).transpose(1, 2)


def exported_attention(
    queries: Tensor, keys: Tensor, values: Tensor, unseen: Tensor, casts: nn.ModuleList | None
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, in the form that TensorRT fuses.

    Args:
        queries: [B, heads, T, D].
        keys: [B, kv, S, D].
        values: [B, kv, S, D].
        unseen: bool [T, S]: True is a key that a query does not see.
        casts: of queries, keys, probabilities and values; None leaves them in high precision.

    Returns:
        [B, heads, T, D].
    """
    group = queries.shape[1] // keys.shape[1]
    queries = queries * (1 / math.sqrt(queries.shape[3]))
    keys_t, values = _repeated(keys, group).transpose(2, 3), _repeated(values, group)
    scores = _cast(casts, 0, queries) @ _cast(casts, 1, keys_t)
    probabilities = scores.masked_fill(unseen, -math.inf).softmax(-1)
    return _cast(casts, 2, probabilities) @ _cast(casts, 3, values)


def _cast(casts: Any, operand: int, x: Tensor) -> Tensor:
    if casts is None:
        return x
    decoded: Tensor = casts[operand](x)[0]
    return decoded


def _repeated(x: Tensor, group: int) -> Tensor:
    """[B, kv, S, D] with every head ``group`` times side by side."""
    if group == 1:
        return x
    return x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


class CacheNames:
    """Names of a cache's tensors, layer by layer."""

    @staticmethod
    def past(layers: int) -> Iterator[str]:
        """Names of the inputs."""
        return (f"past_key_values.{layer}.{role}" for layer in range(layers) for role in ("key", "value"))

    @staticmethod
    def present(layers: int) -> Iterator[str]:
        """Names of the outputs."""
        return (f"present.{layer}.{role}" for layer in range(layers) for role in ("key", "value"))


@torch.no_grad()
def attention_casts(decoder: GraphDecoder, tokens: Tensor, dtype: torch.dtype) -> nn.ModuleList:
    """Casts of every layer's queries, keys, probabilities and values, by the amaxes that ``tokens`` [B, T] show.

    Queries are measured with 1 / sqrt(D) in them, keys with their rotary positions. Probabilities have the scale 1/448.
    """
    amaxes = [[torch.zeros(()) for _ in OPERANDS] for _ in decoder.llama.model.layers]
    decoder.attention_casts = nn.ModuleList(
        nn.ModuleList(_AmaxRecorder(layer_amaxes, operand) for operand in range(len(OPERANDS)))
        for layer_amaxes in amaxes
    )
    decoder(tokens)
    decoder.attention_casts = None
    layers = []
    for index, layer_amaxes in enumerate(amaxes):
        layer_amaxes[OPERANDS.index("probabilities")] = torch.ones(())
        encoded = [encode_scale_from_amax(amax, E4M3) for amax in layer_amaxes]
        names = [f"the {name} of layer {index}" for name in OPERANDS]
        casts = [
            StaticCast(encode, narrowed_scale(encode.reciprocal(), dtype, name))
            for encode, name in zip(encoded, names, strict=True)
        ]
        layers.append(nn.ModuleList(casts))
    return nn.ModuleList(layers)


class _AmaxRecorder(nn.Module):
    """Placeholder of a cast that records the largest magnitude of its input."""

    def __init__(self, amaxes: list[Tensor], operand: int) -> None:
        super().__init__()
        self.amaxes, self.operand = amaxes, operand

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        self.amaxes[self.operand] = torch.maximum(self.amaxes[self.operand], x.abs().amax().float())
        return x, None
