"""Checkpoints: everything a run needs to continue to the last digit, in a folder that is whole or not there.

| file                    | content                                                                                  |
|-------------------------|------------------------------------------------------------------------------------------|
| model.safetensors       | parameters and buffers under their own names; a tied weight once                         |
| optimizer.safetensors   | AdamW's moments as ``parameter/exp_avg`` and so on                                       |
| scaling.safetensors     | ``octavo.scaling_state``: empty unless the recipe is delayed                             |
| state.json              | step, generators, loss scale, lines of metrics.jsonl, hashes of configuration, data, the |
|                         | other files and its own values                                                           |

There is no data position: batches are a function of the step. The files are written into a hidden folder beside the
others, synced, and the folder is renamed; a full disk or a kill leaves earlier checkpoints as they were. Nothing is
pickled.
"""

import base64
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.checksums import file_digest, sealed, unsealed
from octavo.doctor.lines import LinesWritten
from octavo.errors import CheckpointError, DataError
from octavo.files import disk_errors, remove_if_empty, replacing_folder
from octavo.parsing import read_json, read_tensors
from octavo.state import load_scaling_state, scaling_state
from octavo.training.loss_scaling import LossScaler

__all__ = [
    "CheckpointState",
    "foreign_file",
    "latest",
    "load_checkpoint",
    "load_model",
    "newest_lines",
    "read_state",
    "remove_checkpoints",
    "save_checkpoint",
]

FORMAT_VERSION = 1
FOLDER, STATE = "checkpoints", "state.json"
MODEL, OPTIMIZER, SCALING = "model.safetensors", "optimizer.safetensors", "scaling.safetensors"
OWN_FILES = (MODEL, OPTIMIZER, SCALING, STATE)
STEP_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What state.json says beside the files' hashes.

    Attributes:
        step: finished optimizer updates.
        config_hash: of the run's configuration.
        data_hash: of the text trained on.
        model: the decoder's shape, for :class:`octavo.models.LlamaConfig`.
        metrics: the lines of metrics.jsonl when it was saved; None in one by an octavo before 2026-11-24.
    """

    step: int
    config_hash: str
    data_hash: str
    model: dict[str, Any]
    metrics: LinesWritten | None = None


def save_checkpoint(
    run_dir: Path,
    state: CheckpointState,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None = None,
    keep_last: int = 0,
) -> Path:
    """Write ``checkpoints/step-…`` and remove all but the ``keep_last`` newest (0 keeps all).

    Raises:
        CheckpointError: the files cannot be written; earlier checkpoints are untouched.
    """
    target = run_dir / FOLDER / f"step-{state.step:06d}"
    try:
        with replacing_folder(target, is_own=Path.is_dir) as temporary:
            _write(temporary, state, model, optimizer, scaler)
    except OSError as error:
        raise CheckpointError(
            f"cannot save {str(target)!r}: {error.strerror or error}; free some space or choose another disk and "
            "resume, earlier checkpoints are intact"
        ) from error
    if keep_last:
        for old in _complete(run_dir)[:-keep_last]:
            shutil.rmtree(old)
    return target


def latest(run_dir: Path) -> Path | None:
    """The checkpoint of the highest step; folders that were not finished do not count."""
    return max(_complete(run_dir), key=_step_of, default=None)


def foreign_file(run_dir: Path) -> Path | None:
    """A file or folder below ``checkpoints/`` that ``save_checkpoint`` did not make, if there is one."""
    return next((path for path in (run_dir / FOLDER).rglob("*") if not _is_own(path)), None)


def remove_checkpoints(run_dir: Path) -> None:
    """Remove every checkpoint, unfinished ones included, by the names of their files."""
    for path in (run_dir / FOLDER).glob("*"):
        if STEP_NAME.fullmatch(path.name.removeprefix(".").partition(".")[0]):
            for name in OWN_FILES:
                (path / name).unlink(missing_ok=True)
            remove_if_empty(path)
    remove_if_empty(run_dir / FOLDER)


def read_state(path: Path) -> CheckpointState:
    """Read state.json.

    Raises:
        CheckpointError: it is missing, damaged or of another format.
    """
    return _state_from(path, _read_json(path))


def newest_lines(run_dir: Path) -> LinesWritten | None:
    """The lines of metrics.jsonl that the newest checkpoint knows; None where there is none, or it is older than that.

    Raises:
        CheckpointError: it is damaged.
    """
    path = latest(run_dir)
    if path is None:
        return None
    try:
        return read_state(path).metrics
    except CheckpointError:
        if path.exists():
            raise
        return newest_lines(run_dir)  # the run that is watched has saved a newer one meanwhile, and removed this


def load_model(path: Path, model: nn.Module) -> None:
    """Put parameters, buffers and scaling state into a model that is already converted.

    Raises:
        CheckpointError: a damaged file, or tensors of another model; nothing is loaded then.
    """
    raw = _read_json(path)
    own = _unique_tensors(model)
    tensors = _read_tensors(path, MODEL, raw)
    _check_fit(path / MODEL, {name: tensor.shape for name, tensor in own.items()}, tensors)
    scaling = _read_tensors(path, SCALING, raw)
    load_scaling_state(model, scaling)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def load_checkpoint(
    path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler | None = None
) -> CheckpointState:
    """Put everything back where ``save_checkpoint`` found it, torch's generators included.

    Raises:
        CheckpointError: a damaged or missing file, or tensors of another model.
    """
    raw = _read_json(path)
    state = _state_from(path, raw)
    moments = _read_tensors(path, OPTIMIZER, raw)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _check_fit(path / OPTIMIZER, _moment_shapes(parameters), moments)
    if scaler is not None:
        scaler.load_state_dict(raw.get("loss_scaler", {}))
    load_model(path, model)
    for name, parameter in parameters.items():
        own = {key.rpartition("/")[2]: value for key, value in moments.items() if key.rpartition("/")[0] == name}
        optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in own.items()}
    _set_generators(path, raw)
    return state


def _write(
    folder: Path,
    state: CheckpointState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None,
) -> None:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[parameter]}/{key}": value for parameter, own in optimizer.state.items() for key, value in own.items()
    }
    for name, tensors in (
        (MODEL, _unique_tensors(model)),
        (OPTIMIZER, moments),
        (SCALING, scaling_state(model)),
    ):
        with disk_errors(folder / name):
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, folder / name)
    files = {name: _fingerprint(folder / name) for name in (MODEL, OPTIMIZER, SCALING)}
    content = {"format": FORMAT_VERSION, **asdict(state), "files": files, "generators": _generators()}
    if scaler is not None:
        content["loss_scaler"] = scaler.state_dict()
    (folder / STATE).write_text(json.dumps(sealed(content), indent=1) + "\n", encoding="utf-8")


def _complete(run_dir: Path) -> list[Path]:
    """Finished checkpoints, oldest first. Only a rename makes the name, so a name with state.json is finished."""
    folder = run_dir / FOLDER
    found = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name) and (path / STATE).is_file()]
    return sorted(found, key=_step_of)


def _is_own(path: Path) -> bool:
    """Whether the path is the folder of a checkpoint, finished or not, or one of the files in it."""
    folder = path if path.is_dir() else path.parent
    is_step = STEP_NAME.fullmatch(folder.name.removeprefix(".").partition(".")[0]) and folder.parent.name == FOLDER
    return bool(is_step) and (path == folder or path.name in OWN_FILES)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of several names of one tensor the first."""
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if seen.setdefault(id(tensor), name) == name}


def _moment_shapes(parameters: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    shapes = {}
    for name, parameter in parameters.items():
        shapes[f"{name}/step"] = torch.Size()
        shapes[f"{name}/exp_avg"] = shapes[f"{name}/exp_avg_sq"] = parameter.shape
    return shapes


def _check_fit(path: Path, wanted: Mapping[str, torch.Size], found: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    advice = "it belongs to another model; resume with the configuration it was saved under"
    if missing or extra:
        what = f"has no tensor {missing[0]!r}" if missing else f"has a tensor {extra[0]!r} that the model has not"
        raise CheckpointError(f"{str(path)!r} {what}; {advice}")
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{str(path)!r} holds {name!r} as {list(found[name].shape)}, the model needs {list(shape)}; {advice}"
            )


def _read_tensors(path: Path, name: str, raw: dict[str, Any]) -> dict[str, Tensor]:
    file = path / name
    advice = f"delete {str(path)!r} to continue from an earlier checkpoint"
    try:
        found, expected = _fingerprint(file), raw["files"][name]
        if found != expected:
            what = f"has {found['bytes']} bytes, not {expected['bytes']}"
            if found["bytes"] == expected["bytes"]:
                what = "is not what was saved (its SHA-256 differs)"
            raise CheckpointError(f"{str(file)!r} is damaged: it {what}; {advice}")
        return read_tensors(file)
    except (OSError, DataError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error}; {advice}") from error


def _read_json(path: Path) -> dict[str, Any]:
    file = path / STATE
    try:
        raw = read_json(file)
    except (OSError, DataError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error}; name another checkpoint or delete it") from error
    version = raw.get("format") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{str(file)!r} has checkpoint format {version!r}; this octavo reads {FORMAT_VERSION}; "
            "use the one that wrote it"
        )
    try:
        return unsealed(raw)
    except DataError as error:
        raise CheckpointError(f"{str(file)!r} is damaged: {error}; name another checkpoint or delete it") from error


def _state_from(path: Path, raw: dict[str, Any]) -> CheckpointState:
    try:
        for key, kind in (("step", int), ("config_hash", str), ("data_hash", str), ("model", dict)):
            if not isinstance(raw[key], kind):
                raise CheckpointError(
                    f"{str(path / STATE)!r} holds {key} = {raw[key]!r}; delete {str(path)!r} and use an earlier one"
                )
        written = raw.get("metrics")
        metrics = None if written is None else LinesWritten(**written)
        return CheckpointState(
            **{key: raw[key] for key in ("step", "config_hash", "data_hash", "model")}, metrics=metrics
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{str(path / STATE)!r} lacks {error}; delete {str(path)!r} and use an earlier one"
        ) from error


def _fingerprint(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": file_digest(file)}


def _generators() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in states.items()}


def _set_generators(path: Path, raw: dict[str, Any]) -> None:
    try:
        for device, encoded in raw["generators"].items():
            state = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
            if device == "cpu":
                torch.set_rng_state(state)
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(state)
    except (KeyError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the generators in {str(path / STATE)!r} cannot be read: {error}; delete that checkpoint"
        ) from error
