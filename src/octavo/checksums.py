"""SHA-256 of what octavo writes: a number that was changed on the disk is refused by name, and not reported.

| what                                       | where its SHA-256 is                                               |
|--------------------------------------------|--------------------------------------------------------------------|
| the files of a folder that is written once | ``octavo.sha256`` in it, which ``sha256sum -c octavo.sha256`` reads |
| a JSON file that is written alone          | its key ``sha256``, of all other keys (:func:`sealed`)             |
| a line of metrics.jsonl                    | its key ``sha256`` (:mod:`octavo.doctor.lines`)                    |

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

__all__ = ["SUMS", "check_sums", "file_digest", "sealed", "unsealed", "write_sums"]

SUMS = "octavo.sha256"
KEY = "sha256"
HEAD = "# {} files; sha256sum -c " + SUMS


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write ``octavo.sha256`` of all the files that are in a folder and below it."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    lines = [f"{file_digest(folder / name)}  {name}" for name in names]
    (folder / SUMS).write_text("\n".join([HEAD.format(len(lines)), *lines, ""]), encoding="utf-8")


def check_sums(folder: Path) -> bool:
    """Compare the files of a folder with its ``octavo.sha256``; returns whether it has one.

    Raises:
        CheckpointError: a file is missing or is not the one that was written, or the list itself is damaged.
    """
    record = folder / SUMS
    if not record.is_file():
        return False
    for name, digest in _sums(record).items():
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


def _sums(record: Path) -> dict[str, str]:
    """SHA-256 by file."""
    head, *lines = record.read_text(encoding="utf-8", errors="replace").split("\n")
    sums = {line[66:]: line[:64] for line in lines if line[64:66] == "  "}
    if head != HEAD.format(len(sums)):
        raise CheckpointError(
            f"{str(record)!r} is damaged: it lists {len(sums)} files and begins with {head!r}; write or copy "
            "the folder again"
        )
    return sums
