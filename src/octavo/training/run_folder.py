"""Run folders: claim one for training, check its configuration, and load the trained model.

| name             | content                                                        |
|------------------|----------------------------------------------------------------|
| config.toml      | configuration that the run was started with                    |
| tokenizer.json   | tokenizer of the data                                          |
| metrics.jsonl    | every step and evaluation                                      |
| tensorboard/     | the same for TensorBoard                                       |
| checkpoints/     | see :mod:`octavo.training.checkpoint`                          |
| doctor/captures/ | see :mod:`octavo.doctor.capture`                               |
| .lock            | lock of the training process, released when it ends            |
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.doctor.capture import remove_captures
from octavo.errors import CheckpointError, ConfigError, DataError, TrainingError
from octavo.files import remove_if_empty, remove_leftovers, write_atomically
from octavo.models import Llama, LlamaConfig
from octavo.models.sources import RUN_CONFIG, RUN_TOKENIZER, check_run_folder, has_run, runs_in
from octavo.parsing import read_toml
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tokens import TokenData
from octavo.training.autopilot import Autopilot
from octavo.training.checkpoint import (
    CheckpointState,
    foreign_file,
    latest,
    load_model,
    read_state,
    remove_checkpoints,
)
from octavo.training.config import Device, RunConfig, load_config, save_config
from octavo.training.metric_writers import check_loggers
from octavo.training.metrics import METRICS, lines_up_to, read_metrics
from octavo.training.precision import apply_recipe, resolve_device, surroundings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "CAPTURES",
    "TrainedRun",
    "check_start",
    "claimed",
    "is_own_config",
    "load_run",
    "remove_runs",
    "resumable_state",
]

CONFIG, TOKENIZER, LOCK = RUN_CONFIG, RUN_TOKENIZER, ".lock"
CAPTURES = Path("doctor") / "captures"
NO_LINK = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # follow no link, and do not block on a pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A model read back from a run's folder.

    Attributes:
        config: configuration that the run was started with.
        model: model with the recipe of its training, in evaluation mode.
        tokenizer: tokenizer of its data.
        step: finished updates.
        surroundings: reusable context for its forward pass.
    """

    config: RunConfig
    model: Llama
    tokenizer: "Tokenizer"
    step: int
    surroundings: AbstractContextManager[object]


def is_own_config(path: Path) -> bool:
    """Return True if ``save_config`` wrote the file, which has all keys, unlike one written by hand."""
    try:
        return bool(read_toml(path) == load_config(path).to_dict())
    except (OSError, ValueError):
        return False


def remove_runs(run_dirs: Sequence[Path], *, also: tuple[str, ...] = ()) -> None:
    """Remove the files of runs by name, from all folders or from none; other files stay.

    Args:
        run_dirs: folders with a config.toml accepted by :func:`is_own_config`.
        also: names of further files to remove.

    Raises:
        TrainingError: another process trains in one of them.
        ConfigError: a folder of checkpoints has another file.
    """
    with ExitStack() as locks:
        for run_dir in run_dirs:
            locks.enter_context(_locked(run_dir))
            if (other := foreign_file(run_dir)) is not None:
                raise ConfigError(f"{str(other)!r} is not a checkpoint's; move it, or name another folder")
        for run_dir in run_dirs:
            _remove_run(run_dir, also)


def _remove_run(run_dir: Path, also: tuple[str, ...]) -> None:
    remove_checkpoints(run_dir)
    for path in (run_dir / "tensorboard").glob("events.out.tfevents.*"):
        path.unlink()
    for name in (METRICS, TOKENIZER, *also, CONFIG, LOCK):
        (run_dir / name).unlink(missing_ok=True)
    remove_if_empty(run_dir / "tensorboard")
    remove_captures(run_dir / CAPTURES)
    remove_if_empty(run_dir / "doctor")
    remove_if_empty(run_dir)


def load_run(run_dir: str | Path, *, device: Device | None = None) -> TrainedRun:
    """Load the model of the newest checkpoint.

    Args:
        run_dir: the run's folder.
        device: device of the model; None is that of the run's configuration.

    Raises:
        CheckpointError: there is no run, no checkpoint yet, or a damaged one.
        ConfigError: the folder holds a study.
    """
    folder = Path(run_dir)
    check_run_folder(folder)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{str(folder)!r} holds no run (no {CONFIG}); name the folder that octavo train wrote")
    config = load_config(folder / CONFIG)
    path = latest(folder)
    if path is None:
        raise CheckpointError(f"the run in {str(folder)!r} has no finished checkpoint yet; let it train to one")
    state = read_state(path)
    target = resolve_device(device or config.training.device)
    model = Llama(_llama_config(path, state)).to(target)
    training = config.training
    if training.autopilot:
        training = Autopilot(config, lines_up_to(folder, state.step)).training
    apply_recipe(model, training, step=state.step)
    load_model(path, model)
    model.eval()
    return TrainedRun(
        config=config,
        model=model,
        tokenizer=load_tokenizer(folder / TOKENIZER),
        step=state.step,
        surroundings=surroundings(training, target, model),
    )


@contextmanager
def claimed(
    run_dir: Path, config: RunConfig, data: TokenData, *, resume: bool, begin: Callable[[], None] | None = None
) -> Iterator[None]:
    """Lock the folder for this process, and write a new run's configuration and tokenizer, after it has begun.

    ``begin`` writes a new run's first checkpoint. A run that is killed meanwhile has no configuration, so that nothing
    resumes it from other weights.

    A new run that fails before its first step is removed, so that the corrected command can use the folder; one whose
    first step broke stays, for the doctor.

    Raises:
        TrainingError: the folder cannot be written, or another process trains in it.
        ConfigError: the folder holds a run without ``resume``, or with it none or one of another configuration.
    """
    with _locked(run_dir):
        check_start(run_dir, config, resume=resume)
        for place in (run_dir, run_dir / "checkpoints"):
            remove_leftovers(place)
        if resume:
            if not (run_dir / TOKENIZER).exists():
                write_atomically(run_dir / TOKENIZER, data.tokenizer().to_str())
            yield
            return
        try:
            if begin is not None:
                begin()
            save_config(config, run_dir / CONFIG)
            write_atomically(run_dir / TOKENIZER, data.tokenizer().to_str())
            yield
        except Exception:
            if not any(line["kind"] in ("step", "failure") for line in read_metrics(run_dir)):
                _remove_run(run_dir, ())
            raise


def check_start(run_dir: Path, config: RunConfig, *, resume: bool) -> None:
    """Check that a new run can start in the folder, or that its run can be resumed with this configuration.

    Raises:
        ConfigError: it cannot.
    """
    check_loggers(config.training.log)
    if not (resume or (run_dir / CONFIG).exists()) and (run_folders := runs_in(run_dir)):
        raise ConfigError(
            f"{str(run_dir)!r} holds other runs ({', '.join(run_folders)}); give this one a folder of its own, "
            f"such as {str(run_dir / 'new')!r}"
        )
    check_run_folder(run_dir)
    if has_run(run_dir) and not resume:
        raise ConfigError(f"{str(run_dir)!r} already holds a run; continue it with --resume or name another folder")
    if resume and not (run_dir / CONFIG).is_file():
        raise ConfigError(f"there is no run to resume in {str(run_dir)!r}; leave out --resume or name another folder")
    if resume:
        before = load_config(run_dir / CONFIG)
        if before.config_hash() != config.config_hash():
            raise ConfigError(
                f"the run in {str(run_dir)!r} was started with {_difference(before, config)}; "
                "resume with its own values or start a new run in another folder"
            )


def resumable_state(run_dir: Path, config: RunConfig, data: TokenData) -> tuple[Path, CheckpointState] | None:
    """Return the newest checkpoint for this configuration and data, or None without checkpoints.

    Raises:
        CheckpointError: it was made under another configuration or on other text, or the run's tokenizer is not the
            one that made the tokens.
    """
    path = latest(run_dir)
    if path is None:
        _check_tokenizer(run_dir / TOKENIZER, data)
        return None
    state = read_state(path)
    if state.config_hash != config.config_hash():
        raise CheckpointError(
            f"{str(path)!r} was saved under another configuration; resume with the run's own {CONFIG}"
        )
    if state.data_hash != data.content_hash:
        raise CheckpointError(
            f"{str(path)!r} was trained on other text (content hash {state.data_hash}, now {data.content_hash}); "
            "resume on the same data or start a new run"
        )
    _check_tokenizer(run_dir / TOKENIZER, data)
    return path, state


def _check_tokenizer(path: Path, data: TokenData) -> None:
    if not path.exists():  # it will be written again
        return
    try:
        is_same = load_tokenizer(path).to_str() == data.tokenizer().to_str()
    except DataError:
        is_same = False
    if not is_same:
        raise CheckpointError(
            f"{str(path)!r} is not the tokenizer of the run's tokens; put the run's own back, or remove the file, "
            "which is written again then"
        )


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(os.open(run_dir / LOCK, NO_LINK, 0o666), "w")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TrainingError(
                f"{str(run_dir / LOCK)!r} is a symbolic link, which no run makes; remove it, or name another folder"
            ) from error
        raise TrainingError(
            f"cannot write into the run folder {str(run_dir)!r}: {error.strerror}; choose a folder you may write"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TrainingError(
                f"another process is training in {str(run_dir)!r}; wait for it, stop it, or name another folder"
            ) from error
        yield


def _difference(before: RunConfig, now: RunConfig) -> str:
    """Describe the first differing key, with both values."""
    old, new = before.flat(), now.flat()
    differing = (key for key in old if old[key] != new.get(key) and key not in before.free_to_change)
    key = next(differing, "training.overrides")  # whose order alone may differ
    return f"{key} = {old[key]!r}, not {new.get(key)!r}"


def _llama_config(path: Path, state: CheckpointState) -> LlamaConfig:
    try:
        return LlamaConfig(**state.model | {"dense_layers": tuple(state.model.get("dense_layers", ()))})
    except (TypeError, ConfigError) as error:
        raise CheckpointError(
            f"the model's shape in {str(path)!r} cannot be read: {error}; use another checkpoint"
        ) from error
