"""The keys and values of all layers, in pages of 64 positions; in FP8, each vector with a scale of its own.

A key or value of one head, D numbers, is cast when it is stored: E4M3 codes and, of sixteen scales, the one with the
least squared error (:mod:`octavo.numerics.scale_search`). Nothing has to be calibrated, and no later position can
saturate. With D = 64 the cache takes 66 bytes for what takes 128 in BF16.
Keys lie dimension by dimension and values position by position, so that scores and weighted sums both add up rows.

| tensor                 | shape                               | dtype                    |
|------------------------|-------------------------------------|--------------------------|
| keys                   | [layers, pages, kv heads, D, 64]    | E4M3, bfloat16, float32  |
| values                 | [layers, pages, kv heads, 64, D]    | the same                 |
| key_scale, value_scale | [layers, pages, kv heads, 64]       | bfloat16, E4M3 only      |
| table                  | [sequences, pages of one]           | int32                    |

A cache is for one sequence. A batch has the pages of several in the same tensors, so that one call can read the next
token of each.
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
    """Room for the keys and values of one sequence.

    Args:
        layers: number of decoder layers.
        kv_heads: key and value heads of a layer.
        head_dim: width of one head, D.
        max_positions: how many positions must fit; rounded up to whole pages.
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
        """An empty cache of the one sequence that is in a table."""
        made = cls.__new__(cls)
        made.tensors = tensors
        return made

    @property
    def length(self) -> int:
        """Number of positions that are filled; a smaller number forgets what follows."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise ConfigError(
                f"{self._length} positions are filled, of which the first 0 to all can be kept, not {length}"
            )
        self._length = length

    def advance(self, count: int) -> None:
        """Count positions that were stored."""
        self._length += count

    @property
    def capacity(self) -> int:
        """How many positions have room."""
        return self.tensors.table.shape[1] * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of the sequence's keys, values and their scales."""
        t = self.tensors
        every = sum(x.nbytes for x in (t.keys, t.values, t.key_scale, t.value_scale) if x is not None)
        return every // t.keys.shape[1] * t.table.numel()

    def next_positions(self, count: int) -> Tensor:
        """The positions that the next tokens take, int64 [count].

        Raises:
            ConfigError: no room.
        """
        self.check_room(count)
        return torch.arange(self.length, self.length + count, device="cpu")

    def check_room(self, count: int) -> None:
        """Raise ConfigError where there is no room for as many positions."""
        end = self.length + count
        if end > self.capacity:
            raise ConfigError(
                f"this cache has room for {self.capacity} positions, and {end} are needed; make one with more "
                "max_positions"
            )

    def store(self, layer: int, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values, float32 [R, kv heads, D], of R positions of one layer."""
        t = self.tensors
        page, place = t.table[0, position // PAGE].long(), position % PAGE
        for to, scales, vectors in ((t.keys.transpose(-1, -2), t.key_scale, keys), (t.values, t.value_scale, values)):
            if scales is None:
                to[layer, page, :, place] = vectors.to(to.dtype)
                continue
            cast = quantize(vectors, E4M3, granularity=PerRow(), scale=searched_scale(vectors))
            # torch assigns no codes by index
            to.view(torch.uint8)[layer, page, :, place] = cast.data.view(torch.uint8)
            scales[layer, page, :, place] = cast.scale[..., 0].to(scales.dtype)

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The keys and values of the first positions of one layer, float32 [length, kv heads, D]."""
        t = self.tensors
        page = t.table[0, : -(-length // PAGE)].long()
        found = []
        for data, scales in ((t.keys.transpose(-1, -2), t.key_scale), (t.values, t.value_scale)):
            vectors = data[layer].float()[page]
            if scales is not None:
                vectors = vectors * scales[layer, page].float()[..., None]
            found.append(vectors.transpose(1, 2).flatten(0, 1)[:length])
        return found[0], found[1]


class KVCacheBatch:
    """Room for the keys and values of several sequences, which advance together or one by one.

    Args:
        layers: as in :class:`PagedKVCache`.
        kv_heads: as there.
        head_dim: as there.
        sequences: how many.
        max_positions: of each.
        fmt: as there.

    Attributes:
        tensors: of all sequences, with a row of the table for each.
        sequences: a cache for each, over the same tensors.

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
        """Number of positions that are filled in each sequence."""
        return [sequence.length for sequence in self.sequences]

    def check_room(self) -> None:
        """Raise ConfigError where a sequence has no room for another position."""
        for sequence in self.sequences:
            sequence.check_room(1)

    def advance(self) -> None:
        """Count a position of each sequence that was stored."""
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
    """Zeros, and a table that deals out the pages in order."""
    check_sizes(layers=layers, kv_heads=kv_heads, head_dim=head_dim, max_positions=max_positions, sequences=sequences)
    if fmt not in (E4M3, BF16, FP32):
        raise ConfigError(f"a cache holds E4M3, BF16 or FP32, not {fmt}")
    each = -(-max_positions // PAGE)
    numbers = 2 * layers * sequences * each * kv_heads * PAGE * head_dim
    check_fits(
        f"a cache of {sequences * each * PAGE:,} positions",
        numbers * fmt.torch_dtype.itemsize,
        torch.device("cpu"),
        remedy="give it fewer (cache_positions)",
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
