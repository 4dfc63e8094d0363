"""SHA-256 of what octavo writes: a number that was changed on the disk is refused by name, and not reported.

| what                                       | where its SHA-256 is                                               |
|--------------------------------------------|--------------------------------------------------------------------|
| the files of a folder that is written once | ``octavo.sha256`` in it, which ``sha256sum -c octavo.sha256`` reads |
| a JSON file that is written alone          | its key ``sha256``, of all other keys (:func:`sealed`)             |
| a line of metrics.jsonl                    | its key ``sha256`` (:mod:`octavo.doctor.metrics_lines`)            |

They find damage and mistakes, and are no signature: an editor can write a new sum. Files without one, by other programs
or by an octavo before 2026-11-24, are read as they are.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, DataError
from octavo.parsing import parse_json

__all__ = ["KEY", "SUMS", "check_sums", "count_listed", "file_digest", "sealed", "unsealed", "write_sums"]

SUMS = "octavo.sha256"
MOST_BYTES = 16 << 20  # of the list: some 100,000 files
READ_SUFFIXES = {".jinja", ".json", ".model", ".onnx", ".pbtxt", ".py", ".safetensors", ".toml"}  # of what readers open
ADDED_BY_USERS = {"chat_template.jinja", "generation_config.json"}  # settings, which change no number
KEY = "sha256"
HEAD = "# {} files; sha256sum -c " + SUMS


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write ``octavo.sha256`` of all the files that are in a folder and below it."""
    lines = [f"{file_digest(folder / name)}  {name}" for name in sorted(_names(folder))]
    (folder / SUMS).write_text("\n".join([HEAD.format(len(lines)), *lines, ""]), encoding="utf-8")


def check_sums(folder: Path) -> bool:
    """Compare the files of a folder with its ``octavo.sha256``; returns whether it has one.

    The list comes with the folder, and may be written to do harm: it is followed to regular files of the folder alone,
    and has to name all weights, configurations and programs in it (``READ_SUFFIXES`` but ``ADDED_BY_USERS``), since one
    that names none of them proves nothing. A link to a file counts as a file: the hub's cache is made of them.

    Raises:
        CheckpointError: a file is missing, is not the one that was written or is not listed, or the list itself is
            damaged.
    """
    record = folder / SUMS
    if not record.exists():
        return False
    sums = _sums(record)
    later = _names(folder) - sums.keys() - ADDED_BY_USERS
    if unlisted := sorted(name for name in later if Path(name).suffix in READ_SUFFIXES):
        raise CheckpointError(
            f"{str(folder / unlisted[0])!r} is not in {SUMS}, which lists {len(sums)} files: it was put there later; "
            f"remove or write it again, or remove {SUMS} if it is yours"
        )
    for name, digest in sums.items():
        path = folder / name
        try:
            found = file_digest(path)
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}; write the folder again") from error
        if found != digest:
            raise CheckpointError(
                f"{str(path)!r} is damaged or was edited: its SHA-256 is not the one in {SUMS}; write or copy the "
                f"folder again, or remove {SUMS} if the change is yours"
            )
    return True


def count_listed(folder: Path) -> tuple[int, int] | None:
    """Count the files that ``octavo.sha256`` lists and the files beside it; None without a list.

    Raises:
        CheckpointError: the list is damaged.
    """
    record = folder / SUMS
    return (len(_sums(record)), len(_names(folder))) if record.exists() else None


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the SHA-256 of its other keys as its last one.

    Example:
        >>> unsealed(sealed({"step": 3}))
        {'step': 3}
        >>> unsealed(sealed({"step": 3}) | {"step": 4})
        Traceback (most recent call last):
        octavo.errors.DataError: a value in it was changed: its sha256 is another
    """
    return {**record, KEY: _digest(record)}


def unsealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object as it was before :func:`sealed`; one that never was is returned as it is.

    Raises:
        DataError: a value was changed since.
    """
    rest = {key: value for key, value in record.items() if key != KEY}
    if KEY in record and record[KEY] != _digest(rest):
        raise DataError(f"a value in it was changed: its {KEY} is another")
    return rest


def _digest(record: Mapping[str, Any]) -> str:
    as_read = parse_json(json.dumps(record))  # keys are strings there, tuples are lists
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _names(folder: Path) -> set[str]:
    """Files of a folder and below it that can have a sum; what is below a hidden folder is another program's."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return {str(path) for path in paths if not any(part.startswith(".") for part in path.parts[:-1])}


def _sums(record: Path) -> dict[str, str]:
    """SHA-256 by file."""
    if not record.is_file():
        raise CheckpointError(f"{str(record)!r} is no regular file; write or copy the folder again")
    if (size := record.stat().st_size) > MOST_BYTES:
        raise CheckpointError(f"{str(record)!r} is damaged: it has {size >> 20:,} MiB; write or copy the folder again")
    head, *lines = record.read_text(encoding="utf-8", errors="replace").split("\n")
    sums = {line[66:]: line[:64] for line in lines if line[64:66] == "  "}
    if head != HEAD.format(len(sums)):
        raise CheckpointError(
            f"{str(record)!r} is damaged: it lists {len(sums)} files and begins with {head!r}; write or copy "
            "the folder again"
        )
    for name in sums:
        _check_inside(record, name)
    return sums


def _check_inside(record: Path, name: str) -> None:
    """Refuse a name that leads out of the folder, or to a device or a pipe, of which reading need not end."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise CheckpointError(
            f"{str(record)!r} is damaged: it lists {name!r}, which is not in its folder; write or copy the folder again"
        )
    place = record.parent / path
    if place.exists() and not place.is_file():
        raise CheckpointError(
            f"{str(record)!r} is damaged: it lists {name!r}, which is no regular file; write or copy the folder again"
        )
