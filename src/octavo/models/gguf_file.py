"""A GGUF file: the values in its head and the tensors behind it, read in place.

| part     | holds                                                                                         |
|----------|-----------------------------------------------------------------------------------------------|
| head     | "GGUF", version (uint32), number of tensors and of values (uint64), all little-endian         |
| values   | a name, a type, a number, text or list each: the model's shape and its tokenizer              |
| index    | a name, the dimensions (innermost first), an encoding and an offset for each tensor           |
| tensors  | rows of blocks, aligned; an encoding packs so many numbers of a row into so many bytes        |

The file is mapped, not read: opening it touches the head and the index alone, and a tensor is decoded a few rows at a
time into the tensor that is handed out. Encodings, and their decoding, are the library ``gguf``'s. Its own reader makes
an array object for every token of the vocabulary, which takes seconds and trusts every length in the file; here every
length is held against the file's end, and tensors begin at multiples of the alignment and share no byte.

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
SMALLEST_ALIGNMENT = 8  # by the specification; the library and llama.cpp take powers of two alone
MAX_DIMENSIONS = 4
DECODED_AT_ONCE = 1 << 20  # numbers
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
SMALLEST_TEXT = 8  # bytes: the length of an empty one

Value = TypeVar("Value", int, float, str, bool, list[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        shape: as torch has it, the outermost dimension first.
        encoding: the library's member for it.
        start: its first byte in the file.
        row_bytes: bytes of a row, which is the innermost dimension.
    """

    shape: tuple[int, ...]
    encoding: Any
    start: int
    row_bytes: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.start + math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """An open GGUF file.

    Args:
        path: of the file.

    Attributes:
        path: as given.
        values: what the head says, by name.
        tensors: where each tensor lies, by name.

    Raises:
        CheckpointError: the file cannot be read, is not a GGUF file, or is damaged.
        ConfigError: the library ``gguf`` is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._library = _library()
        cursor = _Cursor(self.path)
        self._bytes = cursor.data
        tensors, values = cursor.counts()
        self.values = cursor.named(values, cursor.value)
        index = cursor.named(tensors, cursor.index_entry)
        alignment = self._alignment()
        first = -(-cursor.position // alignment) * alignment
        self.tensors = {name: self._stored(name, *entry, first=first) for name, entry in index.items()}
        self._check_places(first, alignment)

    def get(self, name: str, kind: type[Value], default: Value | None = None) -> Value:
        """A value of the head.

        Raises:
            CheckpointError: it is missing and there is no default, or it is of another kind.
        """
        value = self.values.get(name, default)
        if value is None:
            raise CheckpointError(f"{self.path} says nothing of {name}, which a model of its kind needs")
        if not isinstance(value, kind):
            given = f"{value!r}" if len(repr(value)) < 40 else f"a {type(value).__name__}"
            raise CheckpointError(f"{self.path} has {given} as {name}, where {kind.__name__} belongs")
        return value

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Decode a tensor; beside what is handed out it takes the memory of a few rows.

        Raises:
            CheckpointError: its encoding is not one of numbers that the library decodes.
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
            flat[start : start + step] = torch.from_numpy(np.array(decoded))  # a copy: the file's own is read-only
        return out

    def _alignment(self) -> int:
        alignment = self.get("general.alignment", int, ALIGNMENT)
        if alignment < SMALLEST_ALIGNMENT or alignment.bit_count() != 1:
            raise CheckpointError(
                f"{self.path} is damaged: it has {alignment} as general.alignment, which is a power of two, "
                f"{SMALLEST_ALIGNMENT} or more"
            )
        return alignment

    def _check_places(self, first: int, alignment: int) -> None:
        """Refuse tensors that begin off the alignment, or share bytes: another reader would see other numbers."""
        in_order = sorted(self.tensors.items(), key=lambda item: item[1].start)
        for name, stored in in_order:
            if (stored.start - first) % alignment:
                raise CheckpointError(
                    f"{self.path} is damaged: it stores {name} at offset {stored.start - first}, which is no multiple "
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
                f"{self.path} stores {name} in encoding {encoding}, which the installed gguf does not know"
            ) from error
        numbers, size = self._library.GGML_QUANT_SIZES[kind]
        if shape[-1] % numbers:
            raise CheckpointError(
                f"{self.path} stores rows of {shape[-1]} numbers of {name} as {kind.name}, which packs {numbers}"
            )
        stored = StoredTensor(shape=shape, encoding=kind, start=first + offset, row_bytes=shape[-1] // numbers * size)
        if stored.end > len(self._bytes):
            raise _ended(self.path)
        return stored


class _Cursor:
    """Reads on from where it stands; every length is held against the file's end before it is used."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        try:
            empty = path.stat().st_size == 0  # nothing cannot be mapped
            self.data = np.asarray([] if empty else np.memmap(path, mode="r"), dtype=np.uint8)
        except OSError as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror}") from error

    def counts(self) -> tuple[int, int]:
        """Read the head: how many tensors and how many values there are."""
        if self.data[:4].tobytes() != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        self.position = len(MAGIC)
        version = self.number("I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} is of GGUF version {version}, and versions 2 and 3 are read, little-endian; "
                "convert the model again with a newer tool"
            )
        return self.number("Q"), self.number("Q")

    def named(self, count: int, read: Any) -> dict[str, Any]:
        """``count`` names, each followed by what ``read`` reads."""
        found: dict[str, Any] = {}
        self.need(count * SMALLEST_TEXT)
        for _ in range(count):
            name = self.text()
            if name in found:
                raise CheckpointError(f"{self.path} is damaged: it has two of the name {name!r}")
            found[name] = read()
        return found

    def need(self, count: int) -> None:
        """Raise unless ``count`` more bytes are there."""
        if count > len(self.data) - self.position:
            raise _ended(self.path)

    def take(self, count: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """The next ``count`` bytes."""
        self.need(count)
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, code: str) -> Any:
        """A number, by struct's code."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)).tobytes())[0]

    def text(self) -> str:
        """A length and as many bytes of UTF-8."""
        found = self.take(self.number("Q")).tobytes()
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is damaged: it has {found[:20]!r} where text belongs") from error

    def value(self) -> Any:
        """A type and a value of it."""
        kind = self.number("I")
        return self._list() if kind == LIST else self._plain(kind)

    def index_entry(self) -> tuple[tuple[int, ...], int, int]:
        """Shape, encoding and offset of a tensor."""
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
            raise CheckpointError(f"{self.path} is damaged, or newer than this reader: it has a value of type {kind}")
        return self.number(SCALARS[kind])

    def _list(self) -> list[Any]:
        kind, length = self.number("I"), self.number("Q")
        if kind not in SCALARS:
            self.need(length * SMALLEST_TEXT)
            return [self._plain(kind) for _ in range(length)]
        dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
        found: list[Any] = np.frombuffer(self.take(length * dtype.itemsize).tobytes(), dtype).tolist()
        return found


def _ended(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} ends before its last tensor: it is damaged or not whole; copy it again")


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "a GGUF file is read with the package gguf, which is not installed; pip install 'octavo[hf]'"
        ) from error
    library: ModuleType = gguf
    return library
