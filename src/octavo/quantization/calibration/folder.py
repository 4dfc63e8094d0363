"""Calibration folder on disk.

| file                  | content                                                                           |
|-----------------------|-----------------------------------------------------------------------------------|
| recipe.toml           | the static recipe (``octavo.recipes.from_toml``)                                  |
| scales.safetensors    | float32, decode scales; keys as those of ``octavo.scaling_state``                 |
| calibration.json      | data, health, groups, shapes; the SHA-256 of both other files and of itself       |

The folder is written under a hidden name next to its destination, synced and renamed, so the destination always holds
a complete calibration, old or new. A folder whose calibration.json is missing or does not match the other files is not
read; a folder with any other files is not overwritten.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.checksums import sealed, unsealed
from octavo.errors import CheckpointError, DataError
from octavo.files import check_folder, check_may_write, replacing_folder
from octavo.parsing import parse_tensors, read_object

__all__ = ["check_own_folder", "read_folder", "write_folder"]

FORMAT = "octavo calibration 1"
RECIPE, SCALES, RECORD = "recipe.toml", "scales.safetensors", "calibration.json"


def check_own_folder(folder: Path) -> None:
    """Check that a calibration can be written to a folder; it may hold an older one.

    Raises:
        ConfigError: the path is a file, the folder holds other files, or it is not writable.
    """
    check_folder(folder, is_own=_holds_calibration)
    check_may_write(folder.resolve().parent)  # the new folder is created there and renamed


def write_folder(folder: Path, recipe: str, scales: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write the files; an older calibration is replaced once the new one is complete.

    Raises:
        ConfigError: see :func:`check_own_folder`.
    """
    from safetensors.torch import save

    check_own_folder(folder)
    contents = {RECIPE: recipe.encode(), SCALES: save(scales)}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    text = json.dumps(sealed({"format": FORMAT, "files": hashes, **record}), indent=2, allow_nan=False)
    with replacing_folder(folder, is_own=_holds_calibration) as temporary:
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
        (temporary / RECORD).write_text(text + "\n", encoding="utf-8")


def read_folder(folder: Path) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Read the recipe's text, the scales and the record.

    Raises:
        CheckpointError: the calibration is missing, damaged or incomplete.
    """
    record = _record(folder)
    if record is None or record.get("format") != FORMAT:
        raise CheckpointError(
            f"{str(folder)!r} holds no calibration (no {RECORD} of {FORMAT!r}); name a folder that octavo calibrate "
            "wrote"
        )
    try:
        record = unsealed(record)
        contents = {name: (folder / name).read_bytes() for name in (RECIPE, SCALES)}
        for name, content in contents.items():
            if hashlib.sha256(content).hexdigest() != record["files"][name]:
                raise ValueError(f"{name} is not what was written")
        return contents[RECIPE].decode(), parse_tensors(contents[SCALES]), record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the calibration in {str(folder)!r} is damaged ({error}); calibrate again") from error


def _holds_calibration(folder: Path) -> bool:
    """Report whether a folder holds a calibration, damaged or not, and no other files."""
    if not {path.name for path in folder.iterdir()} <= {RECIPE, SCALES, RECORD}:
        return False
    record = _record(folder)
    return record is not None and record.get("format") == FORMAT


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        return read_object(folder / RECORD)
    except (OSError, DataError):
        return None
