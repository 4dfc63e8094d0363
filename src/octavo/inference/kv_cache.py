"""Paged key-value cache of all layers, in pages of 64 positions; in FP8 with one scale per vector.

The key or value of one head, D elements, is cast to E4M3 when it is stored, with the scale of least squared error among
sixteen (:mod:`octavo.numerics.scale_search`). This needs no calibration, and later positions cannot saturate. With
D = 64 a vector takes 66 bytes instead of 128 in BF16.
Keys are stored by dimension and values by position, so that scores and weighted sums both add contiguous rows.

| tensor                 | shape                               | dtype                    |
|------------------------|-------------------------------------|--------------------------|
| keys                   | [layers, pages, kv heads, D, 64]    | E4M3, bfloat16, float32  |
| values                 | [layers, pages, kv heads, 64, D]    | the same                 |
| key_scale, value_scale | [layers, pages, kv heads, 64]       | bfloat16, E4M3 only      |
| table                  | [sequences, pages of one]           | int32                    |

A cache belongs to one sequence. A batch holds the pages of several sequences in the same tensors, so that one call can
read the next token of each.
"""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import BF16, E4M3, FP32, Format
from octavo.inference.native_decoder import PAGE, CacheTensors
from octavo.kernels import quantize
from octavo.memory import check_fits
from octavo.nn.arguments import check_sizes
from octavo.numerics import PerRow
from octavo.numerics.scale_search import searched_scale

__all__ = ["KVCacheBatch", "PagedKVCache"]


class PagedKVCache:
    """Key-value cache of one sequence.

    Args:
        layers: number of decoder layers.
        kv_heads: key and value heads per layer.
        head_dim: width of one head, D.
        max_positions: capacity in positions; rounded up to whole pages.
        fmt: E4M3, BF16 or FP32.

    Attributes:
        tensors: keys, values, their scales, and the pages of the sequence in order.

    Raises:
        ConfigError: a size below 1, or another format.

    Example:
        >>> cache = PagedKVCache(2, 1, 64, max_positions=100)
        >>> cache.capacity, cache.nbytes / (2 * 2 * 128 * 64)
        (128, 1.03125)
    """

    tensors: CacheTensors
    _length: int = 0

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        max_positions: int,
        fmt: Format = E4M3,
    ) -> None:
        self.tensors = _empty(layers, kv_heads, head_dim, max_positions=max_positions, fmt=fmt)

    @classmethod
    def over(cls, tensors: CacheTensors) -> "PagedKVCache":
        """Create an empty cache over tensors whose table has one sequence."""
        cache = cls.__new__(cls)
        cache.tensors = tensors
        return cache

    @property
    def length(self) -> int:
        """Number of filled positions; setting a smaller number discards the positions after it."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise ConfigError(
                f"{self._length} positions are filled, so the length can be set from 0 to {self._length}, not {length}"
            )
        self._length = length

    def advance(self, count: int) -> None:
        """Count newly stored positions."""
        self._length += count

    @property
    def capacity(self) -> int:
        """Number of positions that fit."""
        return self.tensors.table.shape[1] * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of the sequence's keys, values and scales."""
        t = self.tensors
        every = sum(x.nbytes for x in (t.keys, t.values, t.key_scale, t.value_scale) if x is not None)
        return every // t.keys.shape[1] * t.table.numel()

    def check_room(self, count: int) -> None:
        """Raise ConfigError if ``count`` more positions do not fit."""
        end = self.length + count
        if end > self.capacity:
            raise ConfigError(
                f"this cache has room for {self.capacity} positions, and {end} are needed; make one with more "
                "max_positions"
            )

    def store(self, layer: int, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, float32 [R, kv heads, D], of R positions of one layer."""
        t = self.tensors
        page, place = t.table[0, position // PAGE].long(), position % PAGE
        for to, scales, vectors in ((t.keys.transpose(-1, -2), t.key_scale, keys), (t.values, t.value_scale, values)):
            if scales is None:
                to[layer, page, :, place] = vectors.to(to.dtype)
                continue
            cast = quantize(vectors, E4M3, granularity=PerRow(), scale=searched_scale(vectors))
            # torch has no indexed assignment for FP8
            to.view(torch.uint8)[layer, page, :, place] = cast.data.view(torch.uint8)
            scales[layer, page, :, place] = cast.scale[..., 0].to(scales.dtype)

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Dequantize the first keys and values of one layer, float32 [length, kv heads, D] each."""
        t = self.tensors
        page = t.table[0, : -(-length // PAGE)].long()
        keys_and_values = []
        for data, scales in ((t.keys.transpose(-1, -2), t.key_scale), (t.values, t.value_scale)):
            if scales is None:
                vectors = data[layer][page].float()
            else:
                vectors = data[layer].float()[page] * scales[layer, page].float()[..., None]
            keys_and_values.append(vectors.transpose(1, 2).flatten(0, 1)[:length])
        return keys_and_values[0], keys_and_values[1]


class KVCacheBatch:
    """Key-value caches of several sequences, which advance together or separately.

    Args:
        layers: see :class:`PagedKVCache`.
        kv_heads: see :class:`PagedKVCache`.
        head_dim: see :class:`PagedKVCache`.
        sequences: number of sequences.
        max_positions: capacity of each sequence.
        fmt: see :class:`PagedKVCache`.

    Attributes:
        tensors: tensors of all sequences; the table has a row for each.
        sequences: cache of each sequence, over the same tensors.

    Raises:
        ConfigError: a size below 1, or another format.

    Example:
        >>> batch = KVCacheBatch(2, 1, 64, sequences=3, max_positions=100)
        >>> batch.tensors.table.tolist(), batch.lengths
        ([[0, 1], [2, 3], [4, 5]], [0, 0, 0])
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        sequences: int,
        max_positions: int,
        fmt: Format = E4M3,
    ) -> None:
        self.tensors = _empty(layers, kv_heads, head_dim, max_positions=max_positions, fmt=fmt, sequences=sequences)
        rows = self.tensors.table.split(1)
        self.sequences = tuple(PagedKVCache.over(replace(self.tensors, table=row)) for row in rows)

    @property
    def lengths(self) -> list[int]:
        """Number of filled positions of each sequence."""
        return [sequence.length for sequence in self.sequences]

    def check_room(self) -> None:
        """Raise ConfigError if a sequence is full."""
        for sequence in self.sequences:
            sequence.check_room(1)

    def advance(self) -> None:
        """Count a newly stored position of each sequence."""
        for sequence in self.sequences:
            sequence.advance(1)


def _empty(
    layers: int,
    kv_heads: int,
    head_dim: int,
    *,
    max_positions: int,
    fmt: Format,
    sequences: int = 1,
) -> CacheTensors:
    """Create zeros, with a table that assigns the pages in order."""
    check_sizes(layers=layers, kv_heads=kv_heads, head_dim=head_dim, max_positions=max_positions, sequences=sequences)
    if fmt not in (E4M3, BF16, FP32):
        raise ConfigError(f"a cache holds E4M3, BF16 or FP32, not {fmt}")
    each = -(-max_positions // PAGE)
    numbers = 2 * layers * sequences * each * kv_heads * PAGE * head_dim
    check_fits(
        f"a cache of {sequences * each * PAGE:,} positions",
        numbers * fmt.torch_dtype.itemsize,
        torch.device("cpu"),
        remedy="give fewer (cache_positions)",
    )
    vectors = (layers, sequences * each, kv_heads, PAGE)
    key_scale, value_scale = (
        torch.zeros(vectors, dtype=BF16.torch_dtype, device="cpu") if fmt == E4M3 else None for _ in range(2)
    )
    keys = (layers, sequences * each, kv_heads, head_dim, PAGE)
    return CacheTensors(
        torch.zeros(keys, dtype=fmt.torch_dtype, device="cpu"),
        torch.zeros(*vectors, head_dim, dtype=fmt.torch_dtype, device="cpu"),
        key_scale,
        value_scale,
        torch.arange(sequences * each, dtype=torch.int32, device="cpu").view(sequences, each),
    )
