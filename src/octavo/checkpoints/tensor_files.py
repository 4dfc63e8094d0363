"""Safetensors in a folder: one file, or shards with an index from tensor to file.

| file                                | content                                                              |
|-------------------------------------|----------------------------------------------------------------------|
| model.safetensors                   | all tensors, if they fit into one file                               |
| model-00001-of-00003.safetensors    | the first of three shards                                            |
| model.safetensors.index.json        | `weight_map`: name → file; `metadata.total_size`: bytes of all       |

Files are memory-mapped: a tensor takes memory when it is read.
"""

import json
from collections.abc import Callable, Iterator, Mapping
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
CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
AGAIN = "write or download the folder again"


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], most: int) -> None:
    """Write tensors into an existing folder.

    Args:
        folder: destination.
        tensors: by name, in file order.
        dtypes: dtypes of tensors to cast, by name.
        most: maximum bytes of a shard; a larger tensor gets its own shard.

    Raises:
        ConfigError: a finite number would become infinite in its dtype.
        OSError: the disk is full or not writable.
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
    """Write a JSON file, not atomically, into a temporary folder.

    Raises:
        CheckpointError: the value contains infinity or NaN, which Python reads but JSON does not allow.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError as error:
        raise CheckpointError(
            f"the model's {path.name} contains Infinity or NaN, which JSON does not allow; replace it by a number"
        ) from error
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        CheckpointError: the file cannot be read, or contains no object.
    """
    try:
        return parsing.read_object(path, allow_nan=True)  # Python writes NaN, and some models' files contain it
    except (OSError, DataError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}; {AGAIN}") from error


def check_no_codes(folder: Path) -> None:
    """Check that a folder without a quantization_config contains no FP8 tensors.

    Raises:
        CheckpointError: a tensor is FP8, or a file of tensors cannot be read.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with library_errors(), safe_open(path, framework="pt") as file:
                coded = [name for name in file.keys() if file.get_slice(name).get_dtype() in CODES]  # noqa: SIM118
        except (OSError, DataError) as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}; {AGAIN}") from error
        if coded:
            raise CheckpointError(
                f"{coded[0]} in {str(path)!r} contains FP8 codes, but config.json has no quantization_config; {AGAIN}"
            )


class TensorFiles:
    """Tensors of a folder, by name.

    Args:
        folder: of the files.
        renamed: maps a name in the files to the one here.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or its tensors differ from the index.
    """

    def __init__(self, folder: Path, renamed: Callable[[str], str] = str) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._open_shards(read_json(folder / INDEX).get("weight_map"))
        else:
            opened = self._open(SINGLE)
            self._files = dict.fromkeys(opened.keys(), opened)
        self._stored = {renamed(name): name for name in self._files}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._stored)

    def shape(self, name: str) -> torch.Size:
        """Shape of a tensor, without reading it."""
        return torch.Size(self._slice(name).get_shape())

    def is_fp8(self, name: str) -> bool:
        """Report whether a tensor is FP8."""
        return self.kind(name) in CODES

    def kind(self, name: str) -> str:
        """Element type of a tensor in safetensors' notation, without reading it."""
        kind: str = self._slice(name).get_dtype()
        return kind

    def _slice(self, name: str) -> Any:
        stored = self._stored[name]
        return self._files[stored].get_slice(stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __getitem__(self, name: str) -> Tensor:
        try:
            stored = self._stored[name]
            with library_errors():
                tensor: Tensor = self._files[stored].get_tensor(stored)
        except (OSError, DataError) as error:
            raise CheckpointError(f"{name} in {str(self._folder)!r} cannot be read: {error}; {AGAIN}") from error
        return tensor

    def _open_shards(self, weight_map: Any) -> None:
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{str(self._folder / INDEX)!r} has no weight_map of names and files; {AGAIN}")
        for file in sorted(set(weight_map.values())):
            opened = self._open(file)
            self._files |= dict.fromkeys(opened.keys(), opened)
            if mismatched := sorted(
                set(opened.keys()) ^ {name for name, mapped_file in weight_map.items() if mapped_file == file}
            ):
                raise CheckpointError(
                    f"{str(self._folder / file)!r} and {INDEX} disagree about {mismatched[0]} and "
                    f"{len(mismatched) - 1} more; {AGAIN}"
                )

    def _open(self, file: str) -> Any:
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
    """Split names, in order, into shards of at most ``most`` bytes."""
    names, shard_bytes = list[str](), 0
    for name, tensor in tensors.items():
        size = _bytes(tensor, dtypes.get(name))
        if names and shard_bytes + size > most:
            yield names
            names, shard_bytes = [], 0
        names.append(name)
        shard_bytes += size
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
    return cast if cast.untyped_storage().nbytes() == cast.nbytes else cast.clone()  # a view of a larger tensor


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    with disk_errors(path):
        save_file(tensors, path, metadata={"format": "pt"})
