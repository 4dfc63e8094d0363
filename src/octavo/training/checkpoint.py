"""Checkpoints: everything a run needs to continue bit for bit, in a folder that is written completely or not at all.

| file                    | content                                                                                  |
|-------------------------|------------------------------------------------------------------------------------------|
| model.safetensors       | parameters and buffers under their own names; a tied weight once                         |
| optimizer.safetensors   | AdamW's moments as ``parameter/exp_avg`` and so on                                       |
| scaling.safetensors     | ``octavo.scaling_state``: empty unless the recipe is delayed                             |
| state.json              | step, generators, loss scale, lines of metrics.jsonl, hashes of configuration, data, the |
|                         | other files and its own values                                                           |

There is no data position: batches are a function of the step. On several ranks each writes a part of the first three
files (:mod:`octavo.training.checkpoint_files`), and any number of ranks loads them. The files are written into a hidden
folder, synced, and the folder is renamed; a full disk or a kill leaves earlier checkpoints unchanged. No file uses
pickle.
"""

import base64
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.checksums import sealed, unsealed
from octavo.doctor.metrics_lines import LinesWritten
from octavo.errors import CheckpointError, DataError
from octavo.files import disk_errors, remove_if_empty, replacing_folder
from octavo.nn.scaling_state import load_scaling_state, read_scaling_state, scaling_state
from octavo.parallel.data_parallel import copied_to_cpu, laid_out_as
from octavo.parallel.ranks import ALONE, Ranks
from octavo.parsing import read_json
from octavo.training.checkpoint_files import (
    MODEL,
    OPTIMIZER,
    SCALING,
    STATE,
    StoredTensors,
    fingerprint,
    is_own_name,
    stored_tensors,
)
from octavo.training.loss_scaling import LossScaler

__all__ = [
    "CheckpointState",
    "Snapshot",
    "foreign_file",
    "latest",
    "load_checkpoint",
    "load_model",
    "newest_lines",
    "read_state",
    "remove_checkpoints",
    "save_checkpoint",
    "snapshot",
    "write_checkpoint",
]

FORMAT_VERSION = 1
FOLDER = "checkpoints"
STEP_NAME = re.compile(r"step-(\d+)")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW has for each parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """Content of state.json without the hashes of files.

    Attributes:
        step: finished optimizer updates.
        config_hash: hash of the run's configuration.
        data_hash: hash of the training text.
        model: shape of the decoder, for :class:`octavo.models.LlamaConfig`.
        metrics: record of metrics.jsonl at the time of saving; None in checkpoints from before 2026-11-24.
    """

    step: int
    config_hash: str
    data_hash: str
    model: dict[str, Any]
    metrics: LinesWritten | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run between two steps, as a checkpoint will hold it.

    Attributes:
        step: finished optimizer updates.
        files: tensors by name, by the name of their file.
        content: state.json without the hashes of files.
    """

    step: int
    files: dict[str, dict[str, Tensor]]
    content: dict[str, Any]

    def copied(self) -> "Snapshot":
        """Return one whose tensors are copies in the CPU's memory, which further steps do not change."""
        files = {
            file: {name: copied_to_cpu(tensor) for name, tensor in own.items()} for file, own in self.files.items()
        }
        return replace(self, files=files)


def snapshot(
    state: CheckpointState, *, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler | None = None
) -> Snapshot:
    """Return what a checkpoint will hold; weights and moments are not copied."""
    content = {"format": FORMAT_VERSION, **asdict(state), "generators": _generators()}
    if scaler is not None:
        content["loss_scaler"] = scaler.state_dict()
    return Snapshot(step=state.step, files=_tensors_by_file(model, optimizer), content=content)


def save_checkpoint(
    run_dir: Path,
    state: CheckpointState,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None = None,
    keep_last: int = 0,
    ranks: Ranks = ALONE,
) -> Path:
    """Write ``checkpoints/step-…`` from all ranks: :func:`write_checkpoint` of a :func:`snapshot`."""
    now = snapshot(state, model=model, optimizer=optimizer, scaler=scaler)
    return write_checkpoint(run_dir, now, keep_last=keep_last, ranks=ranks)


def write_checkpoint(
    run_dir: Path, saved: Snapshot, *, keep_last: int = 0, ranks: Ranks = ALONE, group: Any = None
) -> Path:
    """Write ``checkpoints/step-…`` and remove all but the ``keep_last`` newest (0 keeps all).

    Args:
        run_dir: the run's folder.
        saved: what to write.
        keep_last: number of checkpoints to keep.
        ranks: all of them call this, and each writes what it holds.
        group: their process group; None for the default one.

    Raises:
        CheckpointError: the files cannot be written; earlier checkpoints are untouched.
    """
    target = run_dir / FOLDER / f"step-{saved.step:06d}"
    if ranks.size == 1:
        _write_alone(target, saved)
    else:
        from octavo.training.checkpoint_shards import write_shards  # torch takes a second to import what this needs

        write_shards(target, saved.files, lambda folder, sums: _write_state(folder, saved, sums), group=group)
    if keep_last and ranks.is_first:
        for old in _complete(run_dir)[:-keep_last]:
            shutil.rmtree(old)
    return target


def latest(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    return max(_complete(run_dir), key=_step_of, default=None)


def foreign_file(run_dir: Path) -> Path | None:
    """Return a file or folder below ``checkpoints/`` that ``save_checkpoint`` did not create, or None."""
    return next((path for path in (run_dir / FOLDER).rglob("*") if not _is_own(path)), None)


def remove_checkpoints(run_dir: Path) -> None:
    """Remove all checkpoints, including unfinished ones, by the names of their files."""
    for path in (run_dir / FOLDER).glob("*"):
        if STEP_NAME.fullmatch(path.name.removeprefix(".").partition(".")[0]):
            for file in [each for each in path.iterdir() if is_own_name(each.name)]:
                file.unlink()
            remove_if_empty(path)
    remove_if_empty(run_dir / FOLDER)


def read_state(path: Path) -> CheckpointState:
    """Read state.json.

    Raises:
        CheckpointError: it is missing, damaged or of another format.
    """
    return _state_from(path, _read_json(path))


def newest_lines(run_dir: Path) -> LinesWritten | None:
    """Return the newest checkpoint's record of metrics.jsonl; None without a checkpoint, or if it has no record.

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
        return newest_lines(run_dir)  # the running process has replaced this checkpoint with a newer one


def load_model(path: Path, model: nn.Module, *, renews_scales: bool = False) -> None:
    """Load parameters, buffers and scaling state into a converted model.

    Args:
        path: the checkpoint.
        model: receives the tensors.
        renews_scales: the model's recipe may be another; tensors that have no history in the checkpoint keep theirs.

    Raises:
        CheckpointError: a damaged file, or tensors of another model; the model is then unchanged.
    """
    sums = _fingerprints(path, _read_json(path))
    model_tensors = _unique_tensors(model)
    tensors = stored_tensors(path, MODEL, sums)
    _check_shapes(path, {name: tensor.shape for name, tensor in model_tensors.items()}, tensors)
    scales = dict(stored_tensors(path, SCALING, sums))
    if renews_scales:
        scales = {key: scales.get(key, own) for key, own in read_scaling_state(model).items()}
    load_scaling_state(model, scales)
    with torch.no_grad():
        for name, tensor in model_tensors.items():
            tensor.copy_(laid_out_as(tensor, tensors[name]))


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None = None,
    renews_scales: bool = False,
) -> CheckpointState:
    """Restore model, optimizer, loss scaler and torch's generators from a checkpoint.

    Args:
        path: the checkpoint.
        model: receives weights and scaling state.
        optimizer: receives the moments.
        scaler: receives the loss scale; None for a run without one.
        renews_scales: the run has another configuration: what has no scale in the checkpoint keeps its own, and so does
            a loss scaler whose bounds exclude the saved scale.

    Raises:
        CheckpointError: a damaged or missing file, or tensors of another model.
    """
    raw = _read_json(path)
    state = _state_from(path, raw)
    moments = stored_tensors(path, OPTIMIZER, _fingerprints(path, raw))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _check_shapes(path, _moment_shapes(parameters), moments)
    if scaler is not None:
        with suppress(CheckpointError) if renews_scales else nullcontext():
            scaler.load_state_dict(raw.get("loss_scaler", {}))
    load_model(path, model, renews_scales=renews_scales)
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            key: _as_moment(moments[f"{name}/{key}"].to(parameter.device), parameter) for key in MOMENTS
        }
    _set_generators(path, raw)
    return state


def _as_moment(moment: Tensor, parameter: Tensor) -> Tensor:
    """Shard a moment as its parameter is; AdamW's step is a number."""
    return laid_out_as(parameter, moment) if moment.ndim else moment


def _tensors_by_file(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[parameter]}/{key}": value for parameter, own in optimizer.state.items() for key, value in own.items()
    }
    return {MODEL: _unique_tensors(model), OPTIMIZER: moments, SCALING: scaling_state(model)}


def _write_alone(target: Path, saved: Snapshot) -> None:
    try:
        with replacing_folder(target, is_own=Path.is_dir) as temporary:
            for name, tensors in saved.files.items():
                with disk_errors(temporary / name):
                    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, temporary / name)
            _write_state(temporary, saved, {name: fingerprint(temporary / name) for name in saved.files})
    except OSError as error:
        raise CheckpointError(
            f"cannot save {str(target)!r}: {error.strerror or error}; free some space or choose another disk and "
            "resume, earlier checkpoints are intact"
        ) from error


def _write_state(folder: Path, saved: Snapshot, sums: dict[str, dict[str, Any]]) -> None:
    content = json.dumps(sealed({**saved.content, "files": sums}), indent=1)
    (folder / STATE).write_text(content + "\n", encoding="utf-8")


def _complete(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first; the folder gets its name by a rename once it is complete."""
    folder = run_dir / FOLDER
    found = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name) and (path / STATE).is_file()]
    return sorted(found, key=_step_of)


def _is_own(path: Path) -> bool:
    """Return True for the folder of a checkpoint, complete or not, and for the files in it."""
    folder = path if path.is_dir() else path.parent
    is_step = STEP_NAME.fullmatch(folder.name.removeprefix(".").partition(".")[0]) and folder.parent.name == FOLDER
    return bool(is_step) and (path == folder or is_own_name(path.name))


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared tensor once, under its first name."""
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if seen.setdefault(id(tensor), name) == name}


def _moment_shapes(parameters: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {
        f"{name}/{key}": torch.Size() if key == "step" else parameter.shape
        for name, parameter in parameters.items()
        for key in MOMENTS
    }


def _check_shapes(path: Path, expected: Mapping[str, torch.Size], stored: StoredTensors) -> None:
    missing, extra = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    advice = "it belongs to another model; resume with the configuration it was saved under"
    if missing or extra:
        what = f"has no tensor {missing[0]!r}" if missing else f"has a tensor {extra[0]!r} that the model has not"
        raise CheckpointError(f"{str(path)!r} {what}; {advice}")
    for name, shape in expected.items():
        if stored.shapes[name] != shape:
            raise CheckpointError(
                f"{str(path)!r} holds {name!r} as {list(stored.shapes[name])}, the model needs {list(shape)}; {advice}"
            )


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


def _fingerprints(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Size and SHA-256 of the checkpoint's files, by name."""
    sums = raw.get("files")
    if not isinstance(sums, dict):
        raise CheckpointError(
            f"{str(path / STATE)!r} lacks 'files', the sizes and sums of the checkpoint's files, so it was edited; put "
            f"it back as it was, or delete {str(path)!r} and use an earlier one"
        )
    return sums


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
