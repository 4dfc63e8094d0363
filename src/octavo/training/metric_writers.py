"""Copies of a run's numbers to Weights & Biases, MLflow and trackio: ``training.log`` and ``octavo train --log``.

metrics.jsonl remains the record of a run. Each library is imported at its first use and configured as its own
documentation says, by its environment variables, such as ``WANDB_MODE=offline`` or ``MLFLOW_TRACKING_URI``. Runs are
in the project or experiment "octavo", named as their folder; a resumed run is another one of that name.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import ConfigError

__all__ = ["LOGGERS", "TENSORBOARD", "MetricWriter", "MetricWriters", "check_loggers"]

PROJECT = "octavo"
TENSORBOARD = "tensorboard"  # octavo/training/tensorboard_events.py
LIBRARIES = ("wandb", "mlflow", "trackio")
LOGGERS = (TENSORBOARD, *LIBRARIES)


class MetricWriter(Protocol):
    """Receiver of a run's numbers."""

    def open(self, name: str, config: Mapping[str, Any]) -> None:
        """Start a run of this name with a configuration."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record numbers of one step."""

    def close(self) -> None:
        """Write what is pending and end the run."""


class _ProjectWriter:
    """Writer to wandb or trackio, whose functions have the same names."""

    def __init__(self, module: str) -> None:
        self._module = module

    def open(self, name: str, config: Mapping[str, Any]) -> None:
        self._library: Any = importlib.import_module(self._module)
        self._library.init(project=PROJECT, name=name, config=dict(config))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._library.log(dict(numbers), step=step)

    def close(self) -> None:
        self._library.finish()


class _MLflowWriter:
    def open(self, name: str, config: Mapping[str, Any]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(dict(config))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class MetricWriters:
    """Several writers; one that fails is closed to further numbers with one notice, and the run continues.

    Args:
        names: of :data:`LOGGERS`; "tensorboard" is written elsewhere.
        run_dir: the run's folder, by which the run is called.
        config: the run's configuration, flat.
        on_notice: called with a message if numbers cannot be written.
    """

    def __init__(
        self, names: Iterable[str], *, run_dir: Path, config: Mapping[str, Any], on_notice: Callable[[str], None]
    ) -> None:
        self._on_notice = on_notice
        self._writers: dict[str, MetricWriter] = {}
        for name in names:
            if name != TENSORBOARD:
                self._writers[name] = _MLflowWriter() if name == "mlflow" else _ProjectWriter(name)
        self._each(lambda writer: writer.open(run_dir.name, config))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record numbers of one step."""
        if numbers:
            self._each(lambda writer: writer.write(step, numbers))

    def close(self) -> None:
        """End the runs."""
        self._each(lambda writer: writer.close())

    def _each(self, action: Callable[[MetricWriter], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                with redirect_stdout(sys.stderr):  # messages of the library; stdout has the command's result
                    action(writer)
            except Exception as error:  # noqa: BLE001 (errors of the library, its import, the network or a server)
                del self._writers[name]
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                self._on_notice(f"{name} receives no more numbers ({reason}); metrics.jsonl has every number")


def check_loggers(names: Iterable[str]) -> None:
    """Raise ConfigError for a logger whose library is not installed; TensorBoard's absence is only a notice."""
    for name in names:
        if name in LIBRARIES and importlib.util.find_spec(name) is None:
            raise ConfigError(f"logging to {name} needs its package; pip install {name}, or leave it out of log")
