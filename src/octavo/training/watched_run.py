"""Runs as the doctor reads them: statistics of a run, and checks that there are any."""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.doctor import Series, series_of
from octavo.doctor.trainer_settings import read_trainer_settings
from octavo.errors import ConfigError, DataError, TrainingError
from octavo.models import Llama
from octavo.models.sources import check_run_folder
from octavo.text.corpus import Split
from octavo.text.tokens import open_data
from octavo.training.config import RunConfig, load_config
from octavo.training.evaluate import unigram_entropy
from octavo.training.metrics import METRICS, each_metric
from octavo.training.recipe_choice import BF16, PLAIN_RECIPES
from octavo.training.run_folder import CONFIG

__all__ = ["WatchedRun", "check_comparable", "read_run", "watched_run"]

HEAD = "lm_head"
DATA = "data"
COUNTED_TOKENS = 1 << 22  # enough to estimate the text's token frequencies
# Keys that may differ between a run and the reference that its loss is compared with.
OF_PRECISION = {
    "recipe",
    "recipe_options",
    "precision",
    "loss_scale",
    "skip",
    "overrides",
    "convert_head",
    "precision_schedule",
}
OF_THE_MACHINE = {
    "device",
    "threads",
    "checkpoint_interval",
    "keep_checkpoints",
    "async_checkpoints",
    "statistics_interval",
    "cache_weights",
    "autopilot",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """Data of a training run, finished or running.

    Attributes:
        run_dir: the folder.
        config: octavo's configuration; None if another loop trained.
        settings: what a reference must have too; empty if unknown.
        series: statistics of the run.
        step: newest written step.
        samples: number of sampled steps.
    """

    run_dir: Path
    config: RunConfig | None
    settings: dict[str, Any]
    series: Series
    step: int
    samples: int

    @property
    def layers(self) -> int:
        """Number of layers that cast to FP8."""
        return len({key.path for key in self.series.casts.keys})

    @property
    def fp8_begins(self) -> int | None:
        """First FP8 step by the configuration; None if there is none or it is unknown."""
        if self.config is None or not self.config.training.is_fp8:
            return None
        training = self.config.training
        steps = range(1, training.steps + 1)
        return next((step for step in steps if training.recipe_at(step) not in PLAIN_RECIPES), None)

    @property
    def unsampled(self) -> str | None:
        """Reason why no step was sampled, with how to sample some; None if one was."""
        return None if self.samples else _reason_without_statistics(self.config)

    @property
    def steps(self) -> int | None:
        """Updates of the whole run, None if unknown."""
        return None if self.config is None else self.config.training.steps


def watched_run(run_dir: Path) -> WatchedRun:
    """Read a run with statistics, or at least with losses.

    Raises:
        ConfigError: there is no run, it has no step yet, or it has neither statistics nor losses.
        TrainingError: a line is not a run's, or the statistics are those of another model.
    """
    run = read_run(run_dir)
    if run.unsampled is not None and not len(run.series.curve("loss")[0]):
        raise ConfigError(f"the run in {str(run_dir)!r} has no statistics: {run.unsampled}")
    if run.config is not None:
        _check_model(run, run.config)
    return run


def read_run(run_dir: Path) -> WatchedRun:
    """Read a run that may lack statistics, such as a reference in BF16.

    Raises:
        ConfigError: there is no run, it has no step yet, or the folder holds a study.
        TrainingError: a line is not a run's.
        DataError: the settings of Hugging Face's Trainer are damaged.
    """
    check_run_folder(run_dir)
    if not (run_dir / METRICS).is_file():
        raise ConfigError(
            f"{str(run_dir)!r} holds no run (no {METRICS}); name the folder that octavo train, or the Hugging Face "
            "callback, wrote"
        )
    progress = _Progress()
    series = series_of(progress.noting(each_metric(run_dir)))
    config = load_config(run_dir / CONFIG) if (run_dir / CONFIG).is_file() else None
    if not progress.has_begun:
        raise ConfigError(f"the run in {str(run_dir)!r} has finished no step yet; try again when it has")
    return WatchedRun(
        run_dir=run_dir,
        config=config,
        settings=_comparable_values(config) if config is not None else read_trainer_settings(run_dir),
        series=replace(series, unigram_nats=_unigram_nats(run_dir)),
        step=progress.step,
        samples=len(series.casts.steps),
    )


def _unigram_nats(run_dir: Path) -> float | None:
    """Entropy of the tokens in the run's folder or its study's; None if neither has any."""
    for folder in (run_dir / DATA, run_dir.parent / DATA):
        with suppress(DataError):
            return unigram_entropy(open_data(folder), Split.TRAIN, max_tokens=COUNTED_TOKENS)
    return None


@dataclass(slots=True)
class _Progress:
    """Progress of a run, recorded while its lines are read one by one, since a long run's may exceed memory."""

    step: int = 0
    has_begun: bool = False

    def noting(self, lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the lines unchanged."""
        for line in lines:
            self.step = max(self.step, line["step"] - (line["kind"] == "failure"))  # a broken step is not finished
            self.has_begun |= line["kind"] in ("step", "statistics", "failure")
            yield line


def check_comparable(run: WatchedRun, reference: WatchedRun) -> None:
    """Check that a reference has high precision and is otherwise configured as the run.

    Raises:
        ConfigError: the run itself, an FP8 run, or another model, text, batches or schedule (with the first key).
    """
    folder = str(reference.run_dir)
    if reference.run_dir.resolve() == run.run_dir.resolve():
        raise ConfigError(f"{folder!r} is the run itself and no reference; {_reference_command(run)}")
    if reference.layers or (reference.config is not None and reference.config.training.is_fp8):
        recipe_note = "" if reference.config is None else f" (recipe = {reference.config.training.recipe!r})"
        raise ConfigError(f"{folder!r} is no reference: it casts to FP8 too{recipe_note}; {_reference_command(run)}")
    for key, value in run.settings.items() if reference.settings else ():
        if reference.settings.get(key) != value:
            raise ConfigError(
                f"{folder!r} is no reference: it has {key} = {reference.settings.get(key)!r}, not {value!r}; "
                + _reference_command(run)
            )


def _reference_command(run: WatchedRun) -> str:
    """Advice with the shell command that trains a reference."""
    if run.config is None:
        return "train one with the same data and settings, and FP8Callback('bf16')"
    folder = run.run_dir.resolve()
    command = ["octavo", "train", "--config", str(folder / CONFIG), "--recipe", BF16, "--out", f"{folder}-{BF16}"]
    return f"train one with {shlex.join(command)}"


def _comparable_values(config: RunConfig) -> dict[str, Any]:
    return {
        name: value
        for name, value in config.flat().items()
        if name.rpartition(".")[2] not in OF_PRECISION | OF_THE_MACHINE and not name.startswith("parallel.")
    }


def _reason_without_statistics(config: RunConfig | None) -> str:
    if config is None:
        return "train with octavo.doctor.watch or its Hugging Face callback"
    training = config.training
    if not training.is_fp8:
        return f"its recipe {training.recipe!r} casts nothing to FP8; give an FP8 run, and this one with --against"
    if not training.statistics_interval:
        return (
            "its statistics_interval is 0; set it to 10 in a copy of its config.toml and continue with "
            "octavo train --resume --config, or train again"
        )
    return "it was never sampled; train again, or continue it with octavo train --resume"


def _check_model(run: WatchedRun, config: RunConfig) -> None:
    """Check that the statistics are of the configuration's layers; the head's size depends on the text."""
    with torch.device("meta"):
        model = Llama(config.model.llama(vocab_size=1, max_positions=1))
    shapes = {path: (m.in_features, m.out_features) for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    for path, facts in run.series.layers.items():
        shape = (facts.get("in_features"), facts.get("out_features"))
        if path != HEAD and shapes.get(path) != shape:
            raise TrainingError(_other_model(run, f"{path!r} from {shape[0]} to {shape[1]} features"))
    paths = [*(key.path for key in run.series.casts.keys), *(key.path for key in run.series.products.keys)]
    for path in paths:
        if path != HEAD and path not in shapes:
            raise TrainingError(_other_model(run, f"{path!r}, which the statistics are of"))


def _other_model(run: WatchedRun, layer: str) -> str:
    return (
        f"the statistics in {str(run.run_dir / METRICS)!r} are another model's: its {CONFIG} has no layer {layer}; "
        "put both files of one run together"
    )
