"""The tensors of a layer in which something was found, kept in a bounded folder for :mod:`octavo.doctor.replay`.

A capture is one safetensors file, ``<step>-<path>.safetensors`` with the path in percent-encoding:

| tensor        | shape  | what it is                                                         |
|---------------|--------|--------------------------------------------------------------------|
| input         | [M, K] | as the layer was given it, before any cast                         |
| weight        | [N, K] | of that step, before the optimizer changed it                      |
| grad_output   | [M, N] | as backward was given it                                           |
| window        | [3, L] | delayed recipes: the amaxes of finished steps, as AmaxHistory has them |
| amax          | [3]    | delayed recipes: what the scales of that step were made from       |
| input_scale   | []     | static recipes                                                     |

Its metadata say the layer's path, the step, and the recipe as TOML. Of a large layer M and N are samples: rows evenly
spread, and those with the largest element of each tensor, so that every amax is the whole tensor's.
"""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from octavo import recipes
from octavo.errors import ConfigError, DataError
from octavo.files import remove_if_empty, write_atomically
from octavo.parsing import library_errors
from octavo.recipes import Recipe
from octavo.scaling import ROLES

__all__ = ["Capture", "Captures", "load_capture", "remove_captures"]

MOST_BYTES, MOST_FILES = 256 << 20, 16
FORMAT = "octavo-capture-1"
FILE = re.compile(r"\d{8,}-.*\.safetensors")
MATRICES = ("input", "weight", "grad_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What one layer computed with in one step.

    Attributes:
        path: the layer's.
        step: the step's number.
        recipe: what it ran.
        input: [M, K].
        weight: [N, K].
        grad_output: [M, N].
        window: [3, L] float32, the newest first, -1 where there is none; None without a history, as in evaluation.
        amax: [3] float32, what delayed scales were made from, 0 for none; None without a history.
        input_scale: [] float32, a static input's; None without.
    """

    path: str
    step: int
    recipe: Recipe
    input: Tensor
    weight: Tensor
    grad_output: Tensor
    window: Tensor | None = None
    amax: Tensor | None = None
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        x, weight, grad_output = self.input, self.weight, self.grad_output
        if not x.ndim == weight.ndim == grad_output.ndim == 2:
            raise DataError("a capture holds matrices: input [M, K], weight [N, K], grad_output [M, N]")
        if x.shape[1] != weight.shape[1] or grad_output.shape != (x.shape[0], weight.shape[0]):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, weight, grad_output))
            raise DataError(f"a capture's shapes must be [M, K], [N, K] and [M, N], not {shapes}")
        if not all(tensor.is_floating_point() for tensor in self.tensors.values()):
            raise DataError("a capture's tensors are floating-point")
        shapes_of_history = [None if one is None else one.shape[:1] for one in (self.window, self.amax)]
        if shapes_of_history not in ([None, None], [(len(ROLES),)] * 2):
            raise DataError(f"a capture's window is [{len(ROLES)}, L] and its amax [{len(ROLES)}], or neither is there")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, those that are there."""
        named = {name: getattr(self, name) for name in (*MATRICES, "window", "amax", "input_scale")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def file_name(self) -> str:
        """Of its file."""
        return f"{self.step:08d}-{quote(self.path, safe='')}.safetensors"

    def to_bytes(self) -> bytes:
        """The file's content."""
        metadata = {
            "format": FORMAT,
            "path": self.path,
            "step": str(self.step),
            "recipe": recipes.to_toml(self.recipe),
        }
        return save({name: tensor.contiguous() for name, tensor in self.tensors.items()}, metadata)


class Captures:
    """A folder of captures that never grows over its bounds: the oldest make room for the newest.

    Args:
        folder: made when the first capture is written.
        max_bytes: of all files together, 1 or more.
        max_files: 1 or more.

    Raises:
        ConfigError: a bound below 1.

    Example:
        >>> Captures("/nowhere/captures").files()
        []
    """

    def __init__(self, folder: str | Path, *, max_bytes: int = MOST_BYTES, max_files: int = MOST_FILES) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_files", max_files)):
            if value < 1:
                raise ConfigError(f"captures' {name} must be at least 1, not {value!r}")
        self.folder, self.max_bytes, self.max_files = Path(folder), max_bytes, max_files

    def files(self) -> list[Path]:
        """Oldest first, by when they were written."""
        found = [(_written(path), path) for path in self.folder.glob("*.safetensors") if FILE.fullmatch(path.name)]
        return [path for written, path in sorted(found) if written]

    def add(self, capture: Capture) -> Path | None:
        """Write a capture whole, in place of one of the same layer and step; None where it is larger than the bound.

        A capture that cannot be written is left out with a warning: nobody's training ends for it.
        """
        content = capture.to_bytes()
        if len(content) > self.max_bytes:
            self._warn(capture, f"it takes {len(content)} bytes, and all may take {self.max_bytes}")
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            target = self.folder / capture.file_name
            target.unlink(missing_ok=True)
            self._make_room(len(content))
            write_atomically(target, content)
        except OSError as error:
            self._warn(capture, str(error))
            return None
        return target

    def of(self, path: str) -> list[Capture]:
        """A layer's captures, that of the latest step first; one that a running training removes meanwhile is left out.

        Raises:
            DataError: a file is damaged.
        """
        ending = f"{quote(path, safe='')}.safetensors"
        named = [file for file in self.files() if file.name.partition("-")[2] == ending]
        found = map(_loaded, sorted(named, key=_step, reverse=True))
        return [capture for capture in found if capture is not None]

    def steps(self) -> dict[str, int]:
        """The latest step of each captured layer, by path; no file is read."""
        found: dict[str, int] = {}
        for file in self.files():
            path = unquote(file.name.removesuffix(".safetensors").partition("-")[2])
            found[path] = max(_step(file), found.get(path, 0))
        return found

    def _make_room(self, needed: int) -> None:
        files = self.files()
        sizes = [file.stat().st_size for file in files]
        while files and (len(files) >= self.max_files or sum(sizes) + needed > self.max_bytes):
            files.pop(0).unlink()
            sizes.pop(0)

    def _warn(self, capture: Capture, reason: str) -> None:
        warnings.warn(f"layer {capture.path!r} is not captured at step {capture.step}: {reason}", stacklevel=3)


def load_capture(file: str | Path) -> Capture:
    """Read a capture's file.

    Raises:
        DataError: it is missing, torn, or no capture.
    """
    try:
        with library_errors(), safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DataError(f"it says format {metadata.get('format')!r}, not {FORMAT!r}")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        recipe = recipes.from_toml(metadata["recipe"])
        return Capture(path=metadata["path"], step=int(metadata["step"]), recipe=recipe, **tensors)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{str(file)!r} is no capture of the doctor's: {error}; delete it") from error


def remove_captures(folder: Path, *, after_step: int = -1) -> None:
    """Remove the captures in a folder, or those of steps after one, and the folder if nothing else is there."""
    for file in Captures(folder).files():
        if _step(file) > after_step:
            file.unlink()
    remove_if_empty(folder)


def _step(file: Path) -> int:
    return int(file.name.partition("-")[0])


def _written(file: Path) -> int:
    """When, in nanoseconds; 0 for a file that is gone."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _loaded(file: Path) -> Capture | None:
    """None for a file that is gone."""
    try:
        return load_capture(file)
    except DataError:
        if file.exists():
            raise
        return None
