"""A Llama-style decoder on a GPU: what NativeDecoder is on a CPU, as a short list of kernels.

A layer of one or few rows is seven kernels: norm and query-key-value product; turning, casting and storing; attention
and its join; output product and residual; norm, gate and up product and silu · up; down product and residual. Rows of
several sequences are normed by kernels of their own. One token of each sequence is a CUDA graph, captured once for a
cache and a number of sequences and replayed with other tokens and positions, so that a token costs one launch. A new
cache in the memory of an old one finds that one's graph, and torch hands out freed memory again: requests of one size,
one after the other, can share a graph. Elsewhere a cache costs a capture, which waits for the device. The beginning of
a text, hundreds of launches whatever its length, becomes a graph when as many tokens are read into the same memory a
second time.

| rows     | products                                    | between them                        | attention           |
|----------|---------------------------------------------|-------------------------------------|---------------------|
| 1        | FP32 times codes                            | FP32                                | over the cache      |
| 2 to 64  | bfloat16 times codes                        | bfloat16 behind norms, heads, gates | over the cache      |
| more     | E4M3, one scale a row, times codes          | bfloat16                            | torch's, causal (*) |

(*) Of one sequence's tokens, over themselves where it begins and over what the cache holds later; of the next token of
more than 64 sequences, over the cache.

The residual stream is FP32 everywhere: it sums two terms a layer, each of them small beside it, and its bytes are
nothing beside a weight's. Sums are FP32, keys and values go through the cache before any query sees them, as in the
definition, octavo.serving.layers. What many rows gain from FP8 tensor cores they pay for with a rounding of the
activations to E4M3, which the definition does not have.

Bytes of a token: every weight's codes and scales once, the positions' keys and values once, which is the minimum; all
else stays in the second-level cache.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import E4M3
from octavo.kernels.casting import quantize
from octavo.kernels.cpu import ScaleRule
from octavo.kernels.decoder_weights import DecoderWeight, InputCast
from octavo.kernels.decoding import PAGE, CacheTensors, Decoder, DecoderLayer
from octavo.kernels.dispatch import scaled_mm
from octavo.kernels.fused import LONGEST_ROW, cast_activation, cast_norm
from octavo.kernels.result_cast import NormSpec, ResultCast
from octavo.numerics import PerRow, QuantizedTensor, ScaleRounding
from octavo.numerics.scaling import AMAX_FLOOR

__all__ = ["CudaDecoder"]

T = TypeVar("T")

_KEPT = 16  # graphs, and beginnings that may become one; the one used longest ago goes first
_LONGEST_IN_GRAPH = 4096  # tokens; a graph's memory grows with them, and Python's share of the time falls
_BY_ROWS = ResultCast(
    format=E4M3, granularity=PerRow(), rule=ScaleRule(ScaleRounding.FP32, AMAX_FLOOR, 0), transpose=False
)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured run: what it reads, what it writes."""

    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, ...]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer's tensors, the weights as codes."""

    attention_norm: Tensor
    qkv: QuantizedTensor
    out: QuantizedTensor
    mlp_norm: Tensor
    key_mean: Tensor
    gate_up: QuantizedTensor
    down: QuantizedTensor


def _codes_of(layer: DecoderLayer) -> _Layer:
    return _Layer(
        attention_norm=layer.attention_norm,
        qkv=_codes_in(layer.qkv),
        out=_codes_in(layer.out),
        mlp_norm=layer.mlp_norm,
        key_mean=layer.key_mean,
        gate_up=_codes_in(layer.gate_up),
        down=_codes_in(layer.down),
    )


def _codes_in(weight: DecoderWeight) -> QuantizedTensor:
    if not isinstance(weight.rows, QuantizedTensor) or weight.input is not InputCast.NONE or weight.bias is not None:
        raise BackendError("on a GPU a runner has the recipe 'fp8' alone, and no biases; use a CPU for this model")
    return weight.rows


class CudaDecoder:
    """A decoder, ready to be run on the GPU that holds its tensors.

    Args:
        decoder: its tensors.
        embed: tokens, int64 [R], to float32 rows [R, hidden] of their own, by operations that a graph can capture.

    Raises:
        BackendError: a weight that is no FP8 codes, has a bias, or wants its input cast.
    """

    def __init__(self, decoder: Decoder, embed: Callable[[Tensor], Tensor]) -> None:
        self._decoder, self._embed = decoder, embed
        self._layers, self._head = [_codes_of(layer) for layer in decoder.layers], _codes_in(decoder.head)
        self._device = decoder.norm.device
        self._graphs: OrderedDict[tuple[object, ...], _Graph] = OrderedDict()
        self._met: OrderedDict[tuple[object, ...], None] = OrderedDict()  # beginnings
        self._memory: Any = None  # of graphs, of which only one runs at a time: a handle
        self._side: Any = None  # the stream they are captured on: of this device, and one, since memory belongs to it

    def read(self, tokens: Tensor, cache: CacheTensors, start: int, *, every: bool = False) -> Tensor:
        """Read the next tokens of the table's first sequence; their keys and values go into the cache.

        Args:
            tokens: int64 [R], at least one.
            cache: of all layers, on the decoder's device.
            start: the position of the first.
            every: logits after every token, or the last.

        Returns:
            float32 [R, V], or [1, V].

        Raises:
            BackendError: a cache of another model or device, or positions beyond it or the table of angles.
        """
        self._check(cache, start + len(tokens))
        if len(tokens) == 1:
            return self._step(tokens, cache, torch.tensor([start], device="cpu"))
        key = "read", len(tokens), *_place(cache)
        with torch.cuda.device_of(self._decoder.norm):  # where Triton launches
            if start == 0 and not every and self._is_repeated(key, len(tokens)):
                return self._replayed(key, partial(self._read, cache=cache, start=0, every=False), tokens)
            return self._read(tokens, cache, start, every=every)

    def step(self, tokens: Tensor, cache: CacheTensors, positions: list[int]) -> Tensor:
        """Read the next token of every sequence of the table; their keys and values go into the cache.

        Args:
            tokens: int64, one for each sequence.
            cache: of all layers, on the decoder's device.
            positions: of the tokens.

        Returns:
            float32 [sequences, V].

        Raises:
            BackendError: as in :meth:`read`, or not as many tokens and positions as sequences.
        """
        if not len(tokens) == len(positions) == len(cache.table):
            raise BackendError(
                f"a step reads a token of each sequence: {len(cache.table)}, not {len(tokens)} tokens at "
                f"{len(positions)} positions"
            )
        self._check(cache, max(positions) + 1)
        return self._step(tokens, cache, torch.tensor(positions, device="cpu"))

    def _read(self, tokens: Tensor, cache: CacheTensors, start: int, *, every: bool) -> Tensor:
        hidden = self._embed(tokens.to(self._device))
        position = torch.arange(start, start + len(tokens), device=self._device)
        return self._run(hidden, cache, torch.zeros_like(position), position, start=start, every=every)

    def _step(self, tokens: Tensor, cache: CacheTensors, position: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return self._next(tokens, position, cache)
        with torch.cuda.device_of(self._decoder.norm):
            run = partial(self._next, cache=cache)
            return self._replayed(("step", len(tokens), *_place(cache)), run, tokens, position)

    def _is_repeated(self, key: tuple[object, ...], rows: int) -> bool:
        """Whether a beginning of so many rows was met before and is to be a graph; it counts as met from now on."""
        if self._device.type != "cuda" or rows > _LONGEST_IN_GRAPH:
            return False
        if key in self._graphs or key in self._met:
            return True
        _keep(self._met, key, None)
        return False

    def _replayed(self, key: tuple[object, ...], run: Callable[..., Tensor], *given: Tensor) -> Tensor:
        found = self._graphs.pop(key, None) or self._captured(run, given)
        _keep(self._graphs, key, found)
        for held, new in zip(found.given, given, strict=True):
            held.copy_(new, non_blocking=True)
        found.graph.replay()
        return found.logits.clone()

    def _captured(self, run: Callable[..., Tensor], given: tuple[Tensor, ...]) -> _Graph:
        """What runs before, so that kernels are compiled, stores what the replay will store again."""
        held = tuple(x.to(self._device, copy=True) for x in given)
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        self._side = self._side or torch.cuda.Stream(self._device)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):  # what a capture that fails leaves, too
            run(*held)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=self._side):
                logits = run(*held)
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        return _Graph(graph, held, logits)

    def _next(self, tokens: Tensor, position: Tensor, cache: CacheTensors) -> Tensor:
        return self._run(
            self._embed(tokens), cache, torch.arange(len(tokens), device=self._device), position, every=True
        )

    def _run(
        self,
        hidden: Tensor,
        cache: CacheTensors,
        sequence: Tensor,
        position: Tensor,
        *,
        start: int | None = None,
        every: bool,
    ) -> Tensor:
        """The layers and the head; rows from ``start`` on are all of the table's first sequence."""
        from octavo.kernels.triton.attention import attend  # Triton is imported when a GPU is used
        from octavo.kernels.triton.cache import store
        from octavo.kernels.triton.few_rows import FEW, few_rows

        own, eps, scale = self._decoder, self._decoder.shape.norm_eps, self._decoder.shape.attention_scale
        many = len(hidden) > FEW
        product = _many_rows if many else few_rows
        narrow = torch.float32 if len(hidden) == 1 else torch.bfloat16
        place: dict[str, Tensor] = {"sequence": sequence, "position": position}
        kept = _room_for_keys(cache, len(hidden)) if many and start == 0 else None
        for index, layer in enumerate(self._layers):
            qkv = product(hidden, layer.qkv, norm=layer.attention_norm, eps=eps)
            angles = {"cos": own.cos, "sin": own.sin}
            queries = store(qkv, cache, index, key_mean=layer.key_mean, kept=kept, **angles, **place)
            if many and start is not None:
                keys, values = _held(cache, index, start + len(hidden)) if kept is None else kept.permute(1, 2, 0, 3)
                found = _attend_all(queries, keys, values, scale)
            else:
                found = attend(queries, cache, index, scale=scale, out_dtype=narrow, **place)
            product(found.flatten(1), layer.out, residual=hidden, out=hidden)
            if many:
                _mlp_of_many(hidden, layer, eps)
            else:
                gated = few_rows(hidden, layer.gate_up, norm=layer.mlp_norm, eps=eps, gated=True, out_dtype=narrow)
                few_rows(gated, layer.down, residual=hidden, out=hidden)
        last = hidden if every else hidden[-1:]
        return (product if every else few_rows)(last, self._head, norm=own.norm, eps=eps).float()

    def _check(self, cache: CacheTensors, end: int) -> None:
        own = self._decoder
        cache.check_made_for(len(own.layers), own.shape.kv_heads, own.shape.head_dim)
        if cache.keys.device != self._device:
            raise BackendError(f"this decoder is on {self._device} and the cache on {cache.keys.device}")
        room = min(cache.table.shape[1] * PAGE, len(own.cos))
        if end > room:
            raise BackendError(f"this decoder and cache have room for {room} positions, not {end}")


def _keep(kept: OrderedDict[tuple[object, ...], T], key: tuple[object, ...], value: T) -> None:
    kept[key] = value
    if len(kept) > _KEPT:
        kept.popitem(last=False)


def _many_rows(
    x: Tensor | QuantizedTensor,
    weight: QuantizedTensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What few_rows computes, of rows that are cast to E4M3, each with a scale of its own; ``out`` is the residual."""
    if isinstance(x, QuantizedTensor):
        own = x
    elif norm is None:
        own = quantize(x, E4M3, granularity=PerRow())
    else:
        spec = NormSpec(layer=False, eps=eps, zero_centered=False)
        made, _, _ = cast_norm(x, norm, None, spec, _BY_ROWS, handed_on=torch.bfloat16)
        own, _ = made.operands(_BY_ROWS, torch.bfloat16, None)
    y = scaled_mm(own, weight, out_dtype=torch.bfloat16, fast_accumulation=True)
    if residual is None:
        return y
    assert out is residual
    return residual.add_(y)


def _mlp_of_many(hidden: Tensor, layer: _Layer, eps: float) -> None:
    """Add the MLP to rows of the residual stream; the gate's result is cast by the kernel that makes it."""
    y = _many_rows(hidden, layer.gate_up, norm=layer.mlp_norm, eps=eps)
    if layer.down.shape[1] > LONGEST_ROW:
        first, second = y.chunk(2, dim=-1)
        gated = quantize(F.silu(first) * second, E4M3, granularity=PerRow())
    else:
        gated, _ = cast_activation(y, "silu", _BY_ROWS, gated=True).operands(_BY_ROWS, torch.bfloat16, None)
    _many_rows(gated, layer.down, residual=hidden, out=hidden)


def _attend_all(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of the last rows of a sequence over it, bfloat16 [R, heads, D]; keys and values are [kv heads, T, D].

    What begins later than its keys gets the mask that torch's fast kernels know by name.
    """
    from torch.nn.attention.bias import causal_lower_right  # brings torch._dynamo: as slow to import as torch itself

    own = queries.to(keys.dtype).transpose(0, 1)[None]  # [1, heads, R, D]
    whole = len(queries) == keys.shape[1]
    seen = None if whole else causal_lower_right(len(queries), keys.shape[1])
    found = F.scaled_dot_product_attention(
        own, keys[None], values[None], attn_mask=seen, is_causal=whole, scale=scale, enable_gqa=True
    )
    return found[0].transpose(0, 1).to(torch.bfloat16).contiguous()


def _room_for_keys(cache: CacheTensors, rows: int) -> Tensor:
    """Memory for a layer's keys and values of rows that attend to one another, [R, 2, kv heads, D]."""
    dtype = torch.float32 if cache.keys.dtype is torch.float32 else torch.bfloat16
    return torch.empty(rows, 2, *cache.keys.shape[2:4], dtype=dtype, device=cache.keys.device)


def _held(cache: CacheTensors, layer: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first sequence's first positions, [kv heads, length, D].

    FP32 if the cache is, else bfloat16, to which a code times its scale, of nine bits, is rounded.
    """
    pages = cache.table[0, : -(-length // PAGE)].long()
    found = []
    for data, scales in ((cache.keys.transpose(-1, -2), cache.key_scale), (cache.values, cache.value_scale)):
        if scales is None:
            vectors = data[layer, pages]
        else:
            codes = data[layer].view(torch.uint8)[pages].view(data.dtype)
            vectors = codes.to(torch.bfloat16) * scales[layer, pages][..., None]
        found.append(vectors.transpose(0, 1).flatten(1, 2)[:, :length])
    return found[0], found[1]


def _place(cache: CacheTensors) -> list[object]:
    """What of a cache a graph depends on: where its tensors stand, their shapes, and the dtype of what it holds."""
    every = (cache.keys, cache.values, cache.key_scale, cache.value_scale, cache.table)
    return [cache.keys.dtype, *((x.data_ptr(), x.shape) for x in every if x is not None)]
