"""The tensors in a checkpoint's files: of one process, or a file of each rank with the pieces that it held.

| written by    | files of the model                                                 | content             |
|---------------|--------------------------------------------------------------------|---------------------|
| one process   | model.safetensors                                                  | whole tensors       |
| several ranks | model-00001-of-00002.safetensors, model-00002-of-00002.safetensors | pieces and, of what |
|               |                                                                    | is whole, a share   |

A rank's file is one of torch.distributed.checkpoint's safetensors: its metadata has, by tensor, the indices at which
its piece begins. Files are memory-mapped, and a divided tensor is put together when it is read.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from octavo.checksums import file_digest
from octavo.errors import CheckpointError, DataError
from octavo.parsing import library_errors, parse_json, read_tensors

__all__ = [
    "FILES",
    "MODEL",
    "OPTIMIZER",
    "SCALING",
    "STATE",
    "StoredTensors",
    "fingerprint",
    "is_own_name",
    "name_of_part",
    "stored_tensors",
]

MODEL, OPTIMIZER, SCALING = FILES = ("model.safetensors", "optimizer.safetensors", "scaling.safetensors")
STATE = "state.json"
PART = re.compile(r"(model|optimizer|scaling)-\d{5}-of-\d{5}(\.safetensors)")
WRITING = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # torch's name, until the file is complete
PLACES, PLACE = "DCP_SHARDING_INFO", "saved_offsets"
MOST = 1 << 48  # of an index


class StoredTensors(Mapping[str, Tensor]):
    """Whole tensors by name.

    Args:
        files: their files.

    Attributes:
        shapes: shapes of the whole tensors.

    Raises:
        OSError: a file cannot be opened.
        DataError: a file is damaged, or pieces are missing.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._pieces: dict[str, list[tuple[list[int], Tensor]]] = {}
        for file in files:
            places = _places(file)
            for name, tensor in read_tensors(file).items():
                place = [0] * tensor.ndim if places is None else _place(places, name, tensor.ndim)
                self._pieces.setdefault(name, []).append((place, tensor))
        self.shapes = {name: _whole_shape(name, pieces) for name, pieces in self._pieces.items()}

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        if len(pieces) == 1:
            return pieces[0][1]
        whole = torch.empty(self.shapes[name], dtype=pieces[0][1].dtype)
        for place, piece in pieces:
            whole[_slices(place, piece)] = piece
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def stored_tensors(folder: Path, kind: str, sums: Mapping[str, Any]) -> StoredTensors:
    """Read the tensors of one kind, after a comparison of their files with what was saved.

    Args:
        folder: the checkpoint.
        kind: one of :data:`FILES`, with the name that one process gives it.
        sums: fingerprints of the checkpoint's files, by name.

    Raises:
        CheckpointError: a file is missing or is not the one that was saved.
    """
    advice = f"to continue from an earlier checkpoint, delete {str(folder)!r}, or name another with --from"
    file = folder / kind
    try:
        names = [name for name in sums if kind in (name, PART.sub(r"\1\2", name))]
        if not names and kind != SCALING:
            raise CheckpointError(f"{str(folder)!r} has no {kind}; {advice}")
        for file in [folder / name for name in names]:
            _check_unchanged(file, sums[file.name], advice)
        return StoredTensors([folder / name for name in names])
    except (OSError, DataError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error}; {advice}") from error


def fingerprint(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    return {"bytes": file.stat().st_size, "sha256": file_digest(file)}


def name_of_part(kind: str, rank: int, ranks: int) -> str:
    """Name of a rank's file.

    Example:
        >>> name_of_part(MODEL, 0, 2)
        'model-00001-of-00002.safetensors'
    """
    return f"{Path(kind).stem}-{rank + 1:05}-of-{ranks:05}.safetensors"


def is_own_name(name: str) -> bool:
    """Return whether a checkpoint, complete or not, has files of this name."""
    return name in (*FILES, STATE) or bool(PART.fullmatch(name) or WRITING.fullmatch(name))


def _check_unchanged(file: Path, expected: Any, advice: str) -> None:
    found = fingerprint(file)
    if found != expected:
        what = f"has {found['bytes']} bytes, not {expected['bytes']}"
        if found["bytes"] == expected["bytes"]:
            what = "is not what was saved (its SHA-256 differs)"
        raise CheckpointError(f"{str(file)!r} is damaged: it {what}; {advice}")


def _places(file: Path) -> Any:
    """Metadata of a rank's file about its pieces, by tensor; None in a file of whole tensors."""
    with library_errors(), safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
    return parse_json(metadata[PLACES], largest=MOST) if PLACES in metadata else None


def _place(places: Any, name: str, dims: int) -> list[int]:
    entry = places.get(name) if isinstance(places, dict) else None
    place = entry.get(PLACE) if isinstance(entry, dict) else None
    if not isinstance(place, list) or len(place) != dims or not all(type(each) is int and each >= 0 for each in place):
        raise DataError(f"its metadata say that the piece of {name!r} begins at {place!r}")
    return place


def _whole_shape(name: str, pieces: Sequence[tuple[list[int], Tensor]]) -> torch.Size:
    ends = [[start + size for start, size in zip(place, piece.shape, strict=True)] for place, piece in pieces]
    if len(set(map(len, ends))) > 1:
        raise DataError(f"the pieces of {name!r} have different numbers of dimensions")
    shape = [max(column) for column in zip(*ends, strict=True)]
    elements = sum(piece.numel() for _, piece in pieces)
    if elements != math.prod(shape):
        raise DataError(f"the pieces of {name!r} have {elements} of {math.prod(shape)} elements")
    if _overlap(pieces):  # which leaves a gap elsewhere
        raise DataError(f"the pieces of {name!r} overlap")
    return torch.Size(shape)


def _overlap(pieces: Sequence[tuple[list[int], Tensor]]) -> bool:
    """Return whether two pieces have an element in common. Each is compared with those that begin in its rows."""
    boxes = sorted([(each.start, each.stop) for each in _slices(place, piece)] for place, piece in pieces)
    for index, box in enumerate(boxes):
        for other in islice(boxes, index + 1, None):
            if box and other[0][0] >= box[0][1]:
                break
            if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True)):
                return True
    return False


def _slices(place: Sequence[int], piece: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(place, piece.shape, strict=True))
