"""A calibration on disk: a folder of three files.

| file                  | content                                                                           |
|-----------------------|-----------------------------------------------------------------------------------|
| recipe.toml           | the static recipe (``octavo.recipes.from_toml``)                                  |
| scales.safetensors    | float32, decode scales; keys as those of ``octavo.scaling_state``                 |
| calibration.json      | what was seen, health, groups, shapes; the SHA-256 of both others and of itself   |

The folder is written beside its place under a hidden name, synced, and renamed: what has its name is whole, an older
calibration or the new one. One without a calibration.json of this kind, or with another one's files, is not read. One
that holds anything else is somebody's and not written to.
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
    """Refuse a folder that cannot take a calibration, before anything is computed; an older one it may hold.

    Raises:
        ConfigError: it is a file, holds other files, or nobody may write there.
    """
    check_folder(folder, is_own=_holds_calibration)
    check_may_write(folder.resolve().parent)  # where the new one is made


def write_folder(folder: Path, recipe: str, scales: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write the files; an older calibration is there until the new one is whole.

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
    """The recipe's text, the scales and the record.

    Raises:
        CheckpointError: there is no calibration, or a damaged or incomplete one.
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
    """Whether a folder holds one, damaged or not, and nothing else."""
    if not {path.name for path in folder.iterdir()} <= {RECIPE, SCALES, RECORD}:
        return False
    record = _record(folder)
    return record is not None and record.get("format") == FORMAT


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        return read_object(folder / RECORD)
    except (OSError, DataError):
        return None
