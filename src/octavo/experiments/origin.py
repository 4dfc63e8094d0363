"""Origin of an experiment: a run's configuration, its tokens and its newest checkpoint."""

from dataclasses import dataclass, replace
from pathlib import Path

from octavo.errors import ConfigError, DataError
from octavo.experiments.short_run import Start, start_of
from octavo.text.tokens import TokenData, open_data
from octavo.training.checkpoint import latest
from octavo.training.config import RunConfig, load_config
from octavo.training.loop import Trainer
from octavo.training.run_folder import CONFIG
from octavo.training.setup import build_model

__all__ = ["Origin", "origin_of", "run_data", "start_from"]

DATA = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Configuration, data and initial state of experiments.

    Attributes:
        config: configuration of the training.
        data: the token files.
        start: initial state; None for initial weights.
    """

    config: RunConfig
    data: TokenData
    start: Start | None = None

    @property
    def first_step(self) -> int:
        """Number of updates behind the weights."""
        return 0 if self.start is None else self.start.step


def origin_of(run_dir: Path) -> Origin:
    """The origin of a run at its newest checkpoint, or at its initial weights without one.

    Raises:
        ConfigError: the folder holds no run.
        DataError: its tokens are missing.
        CheckpointError: the checkpoint is damaged, or of another configuration or text.
    """
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run (no {CONFIG}); name the folder that octavo train wrote")
    origin = Origin(config=load_config(run_dir / CONFIG), data=run_data(run_dir))
    return replace(origin, start=start_from(run_dir, origin))


def start_from(run_dir: Path, origin: Origin) -> Start | None:
    """Load a run's newest checkpoint as resuming would; None without a checkpoint.

    Raises:
        CheckpointError: it is damaged, or of another configuration or text.
    """
    if latest(run_dir) is None:
        return None
    model, converted = build_model(origin.config, origin.data.vocab_size)
    trainer = Trainer(origin.config, run_dir, model, data=origin.data, on_event=lambda _: None, converted=converted)
    return start_of(trainer)


def run_data(run_dir: Path) -> TokenData:
    """Open the tokens of a run, in its folder or in that of its study.

    Raises:
        DataError: the tokens are in neither folder, or damaged.
    """
    for folder in (run_dir / DATA, run_dir.parent / DATA):
        if folder.is_dir():
            return open_data(folder)
    raise DataError(
        f"the tokens of the run in {str(run_dir)!r} are neither in its folder nor next to it; octavo train --resume "
        "prepares them again"
    )
