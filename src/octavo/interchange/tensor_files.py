"""Safetensors in a folder: one file, or shards and the index that says which tensor is in which.

| file                                | content                                                              |
|-------------------------------------|----------------------------------------------------------------------|
| model.safetensors                   | all tensors, where they fit into one file                            |
| model-00001-of-00003.safetensors    | the first of three shards                                            |
| model.safetensors.index.json        | `weight_map`: name → file; `metadata.total_size`: bytes of all       |

Reading maps the files: a tensor takes memory when it is asked for.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo import parsing
from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.files import disk_errors
from octavo.parsing import library_errors

__all__ = ["TensorFiles", "check_no_codes", "read_json", "write_json", "write_tensors"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CODES = ("F8_E4M3", "F8_E5M2")
AGAIN = "write or download the folder again"


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], most: int) -> None:
    """Write tensors into an existing folder.

    Args:
        folder: where to.
        tensors: by name, in the order to write them in.
        dtypes: of those that are cast on the way, by name.
        most: bytes of a shard; a tensor that is larger gets a shard of its own.

    Raises:
        ConfigError: a finite number would become infinite in its dtype.
        OSError: the disk is full, or refuses otherwise.
    """
    shards = list(_shards(tensors, dtypes, most))
    names = (
        [SINGLE] if len(shards) == 1 else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in _from_one(shards)]
    )
    for file, shard in zip(names, shards, strict=True):
        _save(folder / file, {name: _cast(name, tensors[name], dtypes.get(name)) for name in shard})
    if len(shards) > 1:
        total = sum(_bytes(tensor, dtypes.get(name)) for name, tensor in tensors.items())
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: object) -> None:
    """Write a JSON file into a folder that is not in its place yet.

    Raises:
        CheckpointError: it would hold infinity or NaN, which Python's reader lets pass and JSON has not.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError as error:
        raise CheckpointError(
            f"the model's {path.name} holds Infinity or NaN, which JSON has no word for and other programs refuse; "
            "write a number in its place"
        ) from error
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return parsing.read_object(path, allow_nan=True)  # Python writes it, and some models' own files have it
    except (OSError, DataError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}; {AGAIN}") from error


def check_no_codes(folder: Path) -> None:
    """Make sure that no tensor of a folder whose configuration knows nothing of it is FP8 codes.

    Raises:
        CheckpointError: one is, or a file of tensors cannot be read.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with library_errors(), safe_open(path, framework="pt") as file:
                coded = [name for name in file.keys() if file.get_slice(name).get_dtype() in CODES]  # noqa: SIM118
        except (OSError, DataError) as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}; {AGAIN}") from error
        if coded:
            raise CheckpointError(
                f"{coded[0]} in {str(path)!r} is FP8 codes, and config.json does not say what of "
                f"(quantization_config); {AGAIN}"
            )


class TensorFiles:
    """The tensors of a folder, by name.

    Raises:
        CheckpointError: a file is missing, truncated or otherwise damaged, or has other tensors than the index says.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._open_shards(read_json(folder / INDEX).get("weight_map"))
        else:
            opened = self._opened(SINGLE)
            self._files = dict.fromkeys(opened.keys(), opened)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return tuple(self._files)

    def shape(self, name: str) -> torch.Size:
        """Of a tensor, without reading it."""
        return torch.Size(self._files[name].get_slice(name).get_shape())

    def is_fp8(self, name: str) -> bool:
        """Whether a tensor is FP8 codes."""
        return self.kind(name) in CODES

    def kind(self, name: str) -> str:
        """What a tensor's elements are, in safetensors' word, without reading it."""
        kind: str = self._files[name].get_slice(name).get_dtype()
        return kind

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        try:
            with library_errors():
                found: Tensor = self._files[name].get_tensor(name)
        except (OSError, DataError) as error:
            raise CheckpointError(f"{name} in {str(self._folder)!r} cannot be read: {error}; {AGAIN}") from error
        return found

    def _open_shards(self, weight_map: Any) -> None:
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{str(self._folder / INDEX)!r} has no weight_map of names and files; {AGAIN}")
        for file in sorted(set(weight_map.values())):
            opened = self._opened(file)
            self._files |= dict.fromkeys(opened.keys(), opened)
            if wrong := sorted(set(opened.keys()) ^ {name for name, where in weight_map.items() if where == file}):
                raise CheckpointError(
                    f"{str(self._folder / file)!r} and {INDEX} disagree about {wrong[0]} and {len(wrong) - 1} more; "
                    f"{AGAIN}"
                )

    def _opened(self, file: str) -> Any:
        path = self._folder / file
        if Path(file).name != file:
            raise CheckpointError(f"{INDEX} names {file!r}, which is not in its folder; {AGAIN}")
        try:
            with library_errors():
                return safe_open(path, framework="pt", device="cpu")
        except (OSError, DataError) as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}; {AGAIN}") from error


def _from_one(items: list[Any]) -> range:
    return range(1, len(items) + 1)


def _shards(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], most: int) -> Iterator[list[str]]:
    """Names, in order, as many together as fit."""
    names, held = list[str](), 0
    for name, tensor in tensors.items():
        size = _bytes(tensor, dtypes.get(name))
        if names and held + size > most:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
    if dtype is not None and int(cast.isinf().sum()) > int(tensor.isinf().sum()):
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise ConfigError(
            f"{name} holds {largest:g}, and {str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:g}; "
            "write it in fp32"
        )
    return cast if cast.untyped_storage().nbytes() == cast.nbytes else cast.clone()  # a part of another tensor


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    with disk_errors(path):
        save_file(tensors, path, metadata={"format": "pt"})
