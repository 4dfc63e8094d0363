"""Cells of a study's grid: one training run each, of a variant, a seed, and factors of learning rate and warm-up.

A cell's folder is a run's folder, and measures.json in it marks the cell as finished:

    cells/tensorwise-lr1-warmup1-seed0/
      config.toml metrics.jsonl checkpoints/     the run, resumed if it was interrupted
      measures.json                              its measures, written last

Equal seeds have equal initial weights and batches in every variant. A run whose loss became NaN or infinite is a
finished cell too: it diverged at ``failed_at``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.checksums import sealed
from octavo.errors import ConfigError, NonFiniteLossError
from octavo.experiments.run_measures import MEASURES, OnPhase, known_measures, measures_of, noise_at, on_step
from octavo.files import write_atomically
from octavo.models.sources import has_run
from octavo.text.tokens import TokenData
from octavo.training.comparison import RunMeasures, run_from_json
from octavo.training.config import RunConfig
from octavo.training.loop import train
from octavo.training.metrics import read_metrics
from octavo.training.result import curves_of
from octavo.training.signals import StoppedBySignal

__all__ = ["Cell", "CellResult", "Variant", "finished_result", "run_cell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Settings that the cells of one column share.

    Attributes:
        name: its name in tables and folders.
        recipe: the recipe of its runs.
        options: options of that recipe.
        training: values of the training section that differ from the study's configuration.
        model: values of the model section that differ.
    """

    name: str
    recipe: str
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the grid.

    Attributes:
        variant: its variant.
        seed: seed of weights and batches.
        lr: factor of the configuration's learning rates.
        warmup: factor of its warm-up.
    """

    variant: Variant
    seed: int
    lr: float = 1.0
    warmup: float = 1.0

    @property
    def name(self) -> str:
        """Name of the cell's folder."""
        return f"{self.variant.name}-lr{self.lr:g}-warmup{self.warmup:g}-seed{self.seed}"

    def config(self, base: RunConfig) -> RunConfig:
        """Configuration of the run.

        Raises:
            ConfigError: an unknown recipe or option, or a value out of range.
        """
        training = base.training
        config = base.with_recipe(self.variant.recipe, **self.variant.options)
        config = config.with_training(
            seed=self.seed,
            lr=training.lr * self.lr,
            min_lr=training.min_lr * self.lr,
            warmup=round(training.warmup * self.warmup),
        )
        config = config.with_training(**self.variant.training)
        return replace(config, model=replace(config.model, **self.variant.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Measures of a finished cell.

    Attributes:
        cell: the cell.
        run: its measures; of a diverged run the curves up to the failure, and no windows.
        failed_at: the step whose loss or gradient was not finite; None for a run that reached its last step.
        noise_scale: variance of the gradient between micro-batches over the square of its mean, in micro-batches
            (arXiv 1812.06162, B_simple), at the final weights; None if the run diverged or the mean is below the noise.
    """

    cell: Cell
    run: RunMeasures
    failed_at: int | None = None
    noise_scale: float | None = None

    @property
    def diverged(self) -> bool:
        """True if the run did not reach its last step."""
        return self.failed_at is not None


def run_cell(
    cell: Cell,
    folder: Path,
    base: RunConfig,
    data: TokenData,
    *,
    noise_batches: int,
    report: OnPhase = lambda _: None,
) -> CellResult:
    """Train a cell's run or finish an interrupted one, measure it, and write measures.json.

    Raises:
        StoppedBySignal: a signal stopped the run after a checkpoint.
        ConfigError: the folder holds a run of another configuration.
    """
    config = cell.config(base)
    try:
        trained = train(config, folder, data=data, resume=has_run(folder), on_event=on_step(cell.name, report))
    except NonFiniteLossError:
        result = _diverged(cell, folder)
    else:
        if trained.stopped_by is not None:
            raise StoppedBySignal(trained.stopped_by)
        run = measures_of(trained, config, data, test_tokens=None, report=report)
        result = CellResult(cell=cell, run=run)
        if all(map(math.isfinite, run.window_nats)):
            noise = _noise(folder, config, data, noise_batches, report)
            run = replace(run, gradient_variance=noise["variance"], gradient_error=noise["error"])
            result = replace(result, run=run, noise_scale=noise["scale"])
        else:
            result = replace(result, run=replace(run, window_nats=()), failed_at=run.steps)
    content = {**_identity(cell, base, data), **asdict(result)}
    del content["cell"]
    write_atomically(folder / MEASURES, json.dumps(sealed(content), allow_nan=False) + "\n")
    return result


def _noise(folder: Path, config: RunConfig, data: TokenData, batches: int, report: OnPhase) -> dict[str, float | None]:
    """Gradient noise at a run's final weights by the names of the result's fields; None for numbers that overflowed."""
    recipe = config.training.recipe
    configs = {"fp32": config.with_recipe("fp32"), recipe: config}
    noise = noise_at(folder, configs, data, batches=batches, report=report)[recipe]
    return {name: value if math.isfinite(value) else None for name, value in asdict(noise).items()}


def finished_result(cell: Cell, folder: Path, base: RunConfig, data: TokenData) -> CellResult | None:
    """The measures in a cell's folder; None if it is not finished.

    Raises:
        DataError: measures.json is damaged.
        ConfigError: it was measured under another configuration or on other text.
    """

    def read(content: dict[str, Any]) -> tuple[CellResult, bool]:
        run = run_from_json(content["run"])
        result = CellResult(cell=cell, run=run, failed_at=content["failed_at"], noise_scale=content["noise_scale"])
        return result, all(content[key] == value for key, value in _identity(cell, base, data).items())

    known = known_measures(folder / MEASURES, read)
    if known is None:
        return None
    result, is_same = known
    if not is_same:
        raise ConfigError(
            f"{str(folder)!r} was measured under another configuration or on other text; name another folder with --out"
        )
    return result


def _diverged(cell: Cell, folder: Path) -> CellResult:
    """The curves of a run that broke."""
    lines = read_metrics(folder)
    failed_at = next(int(line["step"]) for line in reversed(lines) if line["kind"] == "failure")
    training, validation = curves_of(folder)
    run = RunMeasures(
        recipe=cell.variant.recipe,
        steps=failed_at - 1,
        train_curve=training,
        validation_curve=validation,
        window_nats=(),
        tokens_per_second=0.0,
        peak_memory_bytes=None,
    )
    return CellResult(cell=cell, run=run, failed_at=failed_at)


def _identity(cell: Cell, base: RunConfig, data: TokenData) -> dict[str, str]:
    return {"config": cell.config(base).config_hash(), "data": data.content_hash}
