"""Captured tensors of layers with findings, in a bounded folder, for :mod:`octavo.doctor.replay`.

A capture is one safetensors file, ``<step>-<path>.safetensors`` with the path in percent-encoding:

| tensor        | shape  | meaning                                                            |
|---------------|--------|--------------------------------------------------------------------|
| input         | [M, K] | the layer's input before any cast                                  |
| weight        | [N, K] | the weight before the optimizer's update                           |
| grad_output   | [M, N] | the gradient before any cast                                       |
| window        | [3, L] | delayed recipes: amaxes of finished steps, as in AmaxHistory       |
| amax          | [3]    | delayed recipes: amaxes that the step's scales were computed from  |
| input_scale   | []     | static recipes: the scale of the input                             |

The metadata hold the layer's path, the step, and the recipe as TOML. M and N of a large layer are sampled: evenly
spread rows and those with each tensor's largest element, so that every amax is that of the whole tensor.
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

MAX_BYTES, MAX_FILES = 256 << 20, 16
FORMAT = "octavo-capture-1"
FILE = re.compile(r"\d{8,}-.*\.safetensors")
MATRICES = ("input", "weight", "grad_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Operands, recipe and scaling state of one layer in one step.

    Attributes:
        path: the layer's path.
        step: the step's number.
        recipe: the recipe that the layer ran.
        input: [M, K].
        weight: [N, K].
        grad_output: [M, N].
        window: [3, L] float32 amax history, newest first, -1 for unused entries; None without a history, as in
            evaluation.
        amax: [3] float32 amaxes that the delayed scales were computed from, 0 for none; None without a history.
        input_scale: [] float32 scale of a static input; None for other recipes.

    Raises:
        DataError: shapes or dtypes do not fit together.
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
            raise DataError("a capture's tensors must be floating-point")
        shapes_of_history = [None if one is None else one.shape[:1] for one in (self.window, self.amax)]
        if shapes_of_history not in ([None, None], [(len(ROLES),)] * 2):
            raise DataError(f"a capture needs both window [{len(ROLES)}, L] and amax [{len(ROLES)}], or neither")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Present tensors by name."""
        named = {name: getattr(self, name) for name in (*MATRICES, "window", "amax", "input_scale")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def file_name(self) -> str:
        """Name of the capture's file."""
        return f"{self.step:08d}-{quote(self.path, safe='')}.safetensors"

    def to_bytes(self) -> bytes:
        """Content of the capture's safetensors file."""
        metadata = {
            "format": FORMAT,
            "path": self.path,
            "step": str(self.step),
            "recipe": recipes.to_toml(self.recipe),
        }
        return save({name: tensor.contiguous() for name, tensor in self.tensors.items()}, metadata)


class Captures:
    """Folder of captures with bounded size: the oldest are deleted to make room for new ones.

    Args:
        folder: the folder, created when the first capture is written.
        max_bytes: limit for all files together, 1 or more.
        max_files: limit for the number of files, 1 or more.

    Raises:
        ConfigError: a bound below 1.

    Example:
        >>> Captures("/nowhere/captures").files()
        []
    """

    def __init__(self, folder: str | Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_files", max_files)):
            if value < 1:
                raise ConfigError(f"captures' {name} must be at least 1, not {value!r}")
        self.folder, self.max_bytes, self.max_files = Path(folder), max_bytes, max_files

    def files(self) -> list[Path]:
        """Capture files, oldest first by modification time."""
        files = [(_mtime_ns(path), path) for path in self.folder.glob("*.safetensors") if FILE.fullmatch(path.name)]
        return [path for mtime, path in sorted(files) if mtime]

    def add(self, capture: Capture) -> Path | None:
        """Write a capture atomically, replacing one of the same layer and step, and return its path.

        A capture that exceeds the size limit or cannot be written is skipped with a warning, and None is returned;
        training continues.
        """
        content = capture.to_bytes()
        if len(content) > self.max_bytes:
            self._warn(capture, f"it takes {len(content)} bytes; the limit for all captures is {self.max_bytes}")
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
        """Captures of one layer, latest step first; files that a running training deletes meanwhile are skipped.

        Raises:
            DataError: a file is damaged.
        """
        suffix = f"{quote(path, safe='')}.safetensors"
        files = [file for file in self.files() if file.name.partition("-")[2] == suffix]
        captures = map(_load_if_present, sorted(files, key=_step, reverse=True))
        return [capture for capture in captures if capture is not None]

    def steps(self) -> dict[str, int]:
        """Latest step of each captured layer by path, from the file names alone."""
        latest: dict[str, int] = {}
        for file in self.files():
            path = unquote(file.name.removesuffix(".safetensors").partition("-")[2])
            latest[path] = max(_step(file), latest.get(path, 0))
        return latest

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
        DataError: the file is missing, truncated, or not a capture.
    """
    try:
        with library_errors(), safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DataError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        recipe = recipes.from_toml(metadata["recipe"])
        return Capture(path=metadata["path"], step=int(metadata["step"]), recipe=recipe, **tensors)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{str(file)!r} is not a capture of the doctor: {error}; delete it") from error


def remove_captures(folder: Path, *, after_step: int = -1) -> None:
    """Remove the captures of steps after ``after_step`` from a folder, and the folder itself if it is then empty."""
    for file in Captures(folder).files():
        if _step(file) > after_step:
            file.unlink()
    remove_if_empty(folder)


def _step(file: Path) -> int:
    return int(file.name.partition("-")[0])


def _mtime_ns(file: Path) -> int:
    """Modification time in nanoseconds; 0 for a deleted file."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _load_if_present(file: Path) -> Capture | None:
    """Load a capture; None for a deleted file."""
    try:
        return load_capture(file)
    except DataError:
        if file.exists():
            raise
        return None
