"""GGUF files: the values in the header and the tensors, read in place.

| part     | holds                                                                                         |
|----------|-----------------------------------------------------------------------------------------------|
| head     | "GGUF", version (uint32), number of tensors and of values (uint64), all little-endian         |
| values   | name, type and value (number, text or list) of each: the model's shape and its tokenizer      |
| index    | name, dimensions (innermost first), encoding and offset of each tensor                        |
| tensors  | aligned rows of blocks; an encoding packs a fixed number of values into a block of bytes      |

The file is memory-mapped: opening it reads only the head and the index, and tensors are decoded a few rows at a time.
Encodings and their decoding are those of the library ``gguf``. Its own reader is not used, because it creates an array
for every token of the vocabulary, which takes seconds, and does not check lengths; here every length is checked against
the file's end, and tensors must begin at multiples of the alignment and share no byte.

Reference: the GGUF specification, github.com/ggml-org/ggml, docs/gguf.md.
"""

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError

__all__ = ["GGUFFile", "StoredTensor"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # unless the file says otherwise
SMALLEST_ALIGNMENT = 8  # by the specification; the library and llama.cpp accept only powers of two
MAX_DIMENSIONS = 4
DECODED_AT_ONCE = 1 << 20  # numbers
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
SMALLEST_TEXT = 8  # bytes: the length of an empty one

Value = TypeVar("Value", int, float, str, bool, list[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Location and encoding of a tensor in the file.

    Attributes:
        shape: shape in torch's order, outermost dimension first.
        encoding: a ``gguf.GGMLQuantizationType``.
        start: offset of the first byte in the file.
        row_bytes: bytes of a row, the innermost dimension.
    """

    shape: tuple[int, ...]
    encoding: Any
    start: int
    row_bytes: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor."""
        return self.start + math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """An open GGUF file.

    Args:
        path: the file.

    Attributes:
        path: the file.
        values: values of the head, by name.
        tensors: locations of the tensors, by name.

    Raises:
        CheckpointError: the file cannot be read, is not a GGUF file, or is damaged.
        ConfigError: the library ``gguf`` is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._library = _library()
        cursor = _GGUFReader(self.path)
        self._bytes = cursor.data
        tensors, values = cursor.counts()
        self.values = cursor.named(values, cursor.value)
        index = cursor.named(tensors, cursor.index_entry)
        alignment = self._alignment()
        first = -(-cursor.position // alignment) * alignment
        self.tensors = {name: self._stored(name, *entry, first=first) for name, entry in index.items()}
        self._check_offsets(first, alignment)

    def get(self, name: str, kind: type[Value], default: Value | None = None) -> Value:
        """Return a value of the head.

        Raises:
            CheckpointError: the value is missing and there is no default, or it has another type.
        """
        value = self.values.get(name, default)
        if value is None:
            raise CheckpointError(f"{self.path} has no {name}, which a model of its kind needs")
        if not isinstance(value, kind):
            description = f"{value!r}" if len(repr(value)) < 40 else f"a {type(value).__name__}"
            raise CheckpointError(f"{self.path} has {description} as {name}, which must be of type {kind.__name__}")
        return value

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Decode a tensor, with temporary memory of a few rows.

        Raises:
            CheckpointError: the library does not decode the tensor's encoding.
        """
        stored = self.tensors[name]
        rows = self._bytes[stored.start : stored.end].reshape(-1, stored.row_bytes)
        out = torch.empty(stored.shape, dtype=dtype, device="cpu")
        flat = out.view(-1, stored.shape[-1])
        step = max(1, DECODED_AT_ONCE // stored.shape[-1])
        for start in range(0, len(rows), step):
            try:
                decoded = self._library.quants.dequantize(rows[start : start + step], stored.encoding)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path} stores {name} as {stored.encoding.name}, which the library gguf does not decode"
                ) from error
            flat[start : start + step] = torch.from_numpy(np.array(decoded))  # copy: the mapped file is read-only
        return out

    def _alignment(self) -> int:
        alignment = self.get("general.alignment", int, ALIGNMENT)
        if alignment < SMALLEST_ALIGNMENT or alignment.bit_count() != 1:
            raise CheckpointError(
                f"{self.path} is damaged: it has {alignment} as general.alignment, which must be a power of two of at "
                f"least {SMALLEST_ALIGNMENT}"
            )
        return alignment

    def _check_offsets(self, first: int, alignment: int) -> None:
        """Raise CheckpointError for misaligned or overlapping tensors, which other readers would decode differently."""
        in_order = sorted(self.tensors.items(), key=lambda item: item[1].start)
        for name, stored in in_order:
            if (stored.start - first) % alignment:
                raise CheckpointError(
                    f"{self.path} is damaged: it stores {name} at offset {stored.start - first}, not a multiple "
                    f"of the alignment {alignment}"
                )
        for (name, stored), (following, other) in pairwise(in_order):
            if other.start < stored.end:
                raise CheckpointError(f"{self.path} is damaged: it stores {name} and {following} in the same bytes")

    def _stored(self, name: str, shape: tuple[int, ...], encoding: int, offset: int, *, first: int) -> StoredTensor:
        try:
            kind = self._library.GGMLQuantizationType(encoding)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path} stores {name} in encoding {encoding}, which the installed package gguf does not support"
            ) from error
        numbers, size = self._library.GGML_QUANT_SIZES[kind]
        if shape[-1] % numbers:
            raise CheckpointError(
                f"{self.path} stores rows of {shape[-1]} numbers of {name} as {kind.name}, in blocks of {numbers}"
            )
        stored = StoredTensor(shape=shape, encoding=kind, start=first + offset, row_bytes=shape[-1] // numbers * size)
        if stored.end > len(self._bytes):
            raise _truncated(self.path)
        return stored


class _GGUFReader:
    """Sequential reader of a file that checks every length against the file's end."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        try:
            empty = path.stat().st_size == 0  # an empty file cannot be mapped
            self.data = np.asarray([] if empty else np.memmap(path, mode="r"), dtype=np.uint8)
        except OSError as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror}") from error

    def counts(self) -> tuple[int, int]:
        """Read the head; return the numbers of tensors and values."""
        if self.data[:4].tobytes() != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        self.position = len(MAGIC)
        version = self.number("I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}; octavo reads versions 2 and 3, little-endian; "
                "convert the model again with a newer tool"
            )
        return self.number("Q"), self.number("Q")

    def named(self, count: int, read: Any) -> dict[str, Any]:
        """Read ``count`` names, each followed by an entry that ``read`` reads."""
        entries: dict[str, Any] = {}
        self.need(count * SMALLEST_TEXT)
        for _ in range(count):
            name = self.text()
            if name in entries:
                raise CheckpointError(f"{self.path} is damaged: it has two entries named {name!r}")
            entries[name] = read()
        return entries

    def need(self, count: int) -> None:
        """Raise CheckpointError unless ``count`` more bytes remain."""
        if count > len(self.data) - self.position:
            raise _truncated(self.path)

    def take(self, count: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Read ``count`` bytes."""
        self.need(count)
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, code: str) -> Any:
        """Read a number of the given ``struct`` format."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)).tobytes())[0]

    def text(self) -> str:
        """Read a length and as many bytes of UTF-8."""
        encoded = self.take(self.number("Q")).tobytes()
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is damaged: it has {encoded[:20]!r} in place of UTF-8 text") from error

    def value(self) -> Any:
        """Read a type and a value of it."""
        kind = self.number("I")
        return self._list() if kind == LIST else self._plain(kind)

    def index_entry(self) -> tuple[tuple[int, ...], int, int]:
        """Read shape, encoding and offset of a tensor."""
        dimensions = self.number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(f"{self.path} is damaged: it has a tensor of {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise CheckpointError(f"{self.path} is damaged: it has a tensor of shape {shape}")
        return shape, self.number("I"), self.number("Q")

    def _plain(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path} is damaged or newer than this reader: it has a value of type {kind}")
        return self.number(SCALARS[kind])

    def _list(self) -> list[Any]:
        kind, length = self.number("I"), self.number("Q")
        if kind not in SCALARS:
            self.need(length * SMALLEST_TEXT)
            return [self._plain(kind) for _ in range(length)]
        dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
        numbers: list[Any] = np.frombuffer(self.take(length * dtype.itemsize).tobytes(), dtype).tolist()
        return numbers


def _truncated(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} ends before its last tensor; the file is incomplete or damaged, copy it again")


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "reading a GGUF file needs the package gguf, which is not installed; pip install 'octavo[gguf]'"
        ) from error
    library: ModuleType = gguf
    return library
