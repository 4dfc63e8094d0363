"""Losses of runs."""

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.doctor.series import Series
from octavo.doctor.watch import Watcher
from octavo.errors import ConfigError
from octavo.plot.style import in_light, notebook_figure
from octavo.reports.doctor_figures import add_loss
from octavo.reports.figures import PALETTE
from octavo.training.watched_run import read_run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["losses", "series_from"]


def losses(*runs: str | Path | Watcher | Series) -> "Figure":
    """Loss of runs over their steps, in nats per token: every step (faint), smoothed, and on validation text (points).

    Args:
        runs: folders that ``octavo train``, ``octavo study`` (a folder of it) or the Hugging Face callback wrote, also
            while they are being written; or watchers of running loops, or their series.

    Raises:
        ConfigError: no run is given, a folder holds no run or a run has no loss yet, or plotly is not installed.
        TrainingError: a line of ``metrics.jsonl`` is damaged.

    Example:
        >>> from octavo.doctor import series_of
        >>> run = series_of([{"kind": "step", "step": step, "loss": 4.0 / step} for step in (1, 2)])
        >>> losses(run).data[0].y
        (4.0, 2.0)
    """
    if not runs:
        raise ConfigError("losses draws runs; give at least one run's folder or watcher")
    figure = notebook_figure("nats per token")
    for index, run in enumerate(runs):
        name = _name(run, index)
        series = series_from(run)
        if not any(len(series.curve(key)[0]) for key in ("loss", "nats")):
            raise ConfigError(
                f"{name} has no loss; in a loop of your own, set notes.loss within watcher.step() as notes"
            )
        add_loss(figure, name, series, list(PALETTE.values())[index % len(PALETTE)])
    figure.for_each_trace(lambda trace: trace.update(showlegend="smoothed" in trace.name))
    figure.update_layout(showlegend=True, height=380)
    return in_light(figure)


def series_from(run: str | Path | Watcher | Series) -> Series:
    """Series of a run's folder or of a watcher.

    Raises:
        ConfigError: the folder holds no run.

    Example:
        >>> from octavo.doctor import series_of
        >>> series = series_of([])
        >>> series_from(series) is series
        True
    """
    if isinstance(run, Series):
        return run
    if isinstance(run, Watcher):
        return run.series()
    if not isinstance(run, str | Path):
        raise ConfigError(f"a run is a folder, a watcher or a Series, not {type(run).__name__}")
    return read_run(Path(run)).series


def _name(run: str | Path | Watcher | Series, index: int) -> str:
    """The folder's path, or a number."""
    return str(run) if isinstance(run, str | Path) else f"run {index + 1}"
