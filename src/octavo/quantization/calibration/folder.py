"""A calibration on disk: a folder of three files.

| file                  | content                                                                           |
|-----------------------|-----------------------------------------------------------------------------------|
| recipe.toml           | the static recipe (``octavo.recipes.from_toml``)                                  |
| scales.safetensors    | float32, decode scales; keys as those of ``octavo.scaling_state``                 |
| calibration.json      | what was seen, health, groups, shapes; the SHA-256 of both others; written last   |

A folder without a calibration.json of this kind, or with another one's files, is not whole and not read. One that holds
anything else is somebody's and not written to.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.files import sync_folder, write_atomically

__all__ = ["check_own_folder", "read_folder", "write_folder"]

FORMAT = "octavo calibration 1"
RECIPE, SCALES, RECORD = "recipe.toml", "scales.safetensors", "calibration.json"


def check_own_folder(folder: Path) -> None:
    """Refuse a folder that holds files, and no calibration.

    Raises:
        ConfigError: it does, or it is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the calibration would go to {str(folder)!r}, which is a file; name a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    record = _record(folder)
    if record is None or record.get("format") != FORMAT:
        raise ConfigError(
            f"the calibration would go to {str(folder)!r}, which holds other files; move them, or name another folder"
        )


def write_folder(folder: Path, recipe: str, scales: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write the files; an older calibration in the folder is invalid from the first of them on.

    Raises:
        ConfigError: the folder holds other files.
    """
    from safetensors.torch import save

    check_own_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents = {RECIPE: recipe.encode(), SCALES: save(scales)}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    text = json.dumps({"format": FORMAT, "files": hashes, **record}, indent=2, allow_nan=False)
    for name, content in contents.items():
        write_atomically(folder / name, content)
    write_atomically(folder / RECORD, text + "\n")
    sync_folder(folder)


def read_folder(folder: Path) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """The recipe's text, the scales and the record.

    Raises:
        CheckpointError: there is no calibration, or a damaged or incomplete one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    record = _record(folder)
    if record is None or record.get("format") != FORMAT:
        raise CheckpointError(
            f"{str(folder)!r} holds no calibration (no {RECORD} of {FORMAT!r}); name a folder that octavo calibrate "
            "wrote"
        )
    try:
        contents = {name: (folder / name).read_bytes() for name in (RECIPE, SCALES)}
        for name, content in contents.items():
            if hashlib.sha256(content).hexdigest() != record["files"][name]:
                raise ValueError(f"{name} is not what was written")
        return contents[RECIPE].decode(), load(contents[SCALES]), record
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"the calibration in {str(folder)!r} is damaged ({error}); calibrate again") from error


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
