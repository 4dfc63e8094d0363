"""Metrics of a run: metrics.jsonl, and copies for TensorBoard and other loggers.

metrics.jsonl has one JSON object per line, each flushed when written:

    {"kind": "evaluation", "step": 0, "nats": 7.6, "perplexity": 2012.3}
    {"kind": "step", "step": 1, "loss": 7.6, "lr": 1e-4, "grad_norm": 2.1, "tokens": 1024, "seconds": 0.4, "threads": 2}

A perplexity that overflows float64, for a loss above 709 nats, is null.

With a loss scale, a "step" also has ``loss_scale``, and a step repeated with a smaller scale is preceded by a line
{"kind": "overflow", "step": 7, "loss_scale": 65536.0} with the scale that was too large.

When a phase of another recipe begins (octavo/training/precision_schedule.py), a line {"kind": "precision", "step": 321,
"recipe": "tensorwise"} precedes its first step.

A run of an FP8 recipe is sampled every ``statistics_interval`` steps: the lines "watched" and "statistics" are
described in octavo/doctor/series.py. A run that broke ends with {"kind": "failure", "step": 8, "loss": null,
"grad_norm": null, "tensor": "output of …"}, with the first non-finite tensor if a replay of the step found one.

The autopilot writes "autopilot" lines, described in octavo/training/autopilot_journal.py, and lines {"kind":
"probation", "step": 90, "path": …, "number": 1, "names": …, "values": …} with the content of "watched" and "statistics"
for one layer under the recipe that it would run without the act of that number.

Only ``seconds`` varies between equal runs; all other fields of a resumed run equal those of an uninterrupted one with
the same number of CPU ``threads``. Resuming first removes lines after the checkpoint.

Each line has the ``sha256`` of octavo.doctor.metrics_lines, and each checkpoint records which lines there were when it
was saved: a changed line is refused, and so is a file with fewer lines than the newest checkpoint records.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.doctor import Sample
from octavo.doctor.metrics_lines import METRICS, LinesWritten, LineWriter, SampleLines, each_line
from octavo.files import write_atomically
from octavo.parsing import parse_json
from octavo.training.checkpoint import newest_lines
from octavo.training.metric_writers import TENSORBOARD, MetricWriters
from octavo.training.tensorboard_events import TensorBoardEvents

__all__ = ["METRICS", "Log", "MetricsLog", "NoLog", "each_metric", "lines_up_to", "read_metrics"]

CURVES = {"step": ("loss", "lr", "grad_norm"), "evaluation": ("nats", "perplexity"), "overflow": ("loss_scale",)}


class MetricsLog:
    """Log that appends to metrics.jsonl and to the loggers.

    Args:
        run_dir: the run's folder.
        after_step: step of the checkpoint that the run continues from; later lines are removed, and all lines without
            a checkpoint (None).
        loggers: names of octavo.training.metric_writers.
        config: the run's configuration, for the loggers.
        on_line: called with each line as it will be read back.
        on_notice: called with a message if TensorBoard events cannot be written; metrics.jsonl is still written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        after_step: int | None,
        loggers: Sequence[str] = (TENSORBOARD,),
        config: Mapping[str, Any] | None = None,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        path = run_dir / METRICS
        previous_lines = [] if after_step is None else lines_up_to(run_dir, after_step)
        self._lines = LineWriter()
        write_atomically(path, "".join(map(self._lines.line, previous_lines)))
        self._samples = SampleLines(previous_lines)
        self._on_line = on_line
        self._file = path.open("a", encoding="utf-8")
        folder, first = run_dir / TENSORBOARD, (after_step or 0) + 1
        self._events = (
            TensorBoardEvents(folder, purge_step=first, on_notice=on_notice) if TENSORBOARD in loggers else None
        )
        self._writers = MetricWriters(loggers, run_dir=run_dir, config=config or {}, on_notice=on_notice)

    def on_disk(self) -> LinesWritten:
        """Sync the written lines to disk and return their record."""
        os.fsync(self._file.fileno())
        return self._lines.written

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line."""
        line = self._lines.line({"kind": kind, "step": step, **values})
        self._file.write(line)
        self._file.flush()
        if self._on_line is not None:
            self._on_line({key: value for key, value in parse_json(line).items() if key != "sha256"})
        scalars = {name: values[name] for name in CURVES.get(kind, ()) if values[name] is not None}
        if self._events is not None:
            self._events.add(kind, step, scalars)
        self._writers.write(step, {f"{kind}/{name}": value for name, value in scalars.items()})

    def write_sample(self, sample: Sample) -> None:
        """Append a sample of the model: names if they changed, then values."""
        for kind, values in self._samples.of(sample):
            self.write(kind, sample.step, **values)
        if self._events is not None:
            self._events.add_together(sample.step, sample.scalars_by_name())
        self._writers.write(sample.step, dict(sample.scalars_by_name()))

    def close(self) -> None:
        """Close the file and the loggers."""
        self._file.close()
        if self._events is not None:
            self._events.close()
        self._writers.close()


class NoLog:
    """Log of a rank that writes none."""

    def on_disk(self) -> None:
        """Return no record of lines."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Drop a line."""

    def write_sample(self, sample: Sample) -> None:
        """Drop a sample."""

    def close(self) -> None:
        """Close nothing."""


Log = MetricsLog | NoLog


def each_metric(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of metrics.jsonl; none if there is no file.

    An incomplete last line, left by a killed process, is skipped.

    Raises:
        TrainingError: another line is damaged, or lines of the newest checkpoint are missing.
        CheckpointError: that checkpoint is damaged.
    """
    return each_line(run_dir / METRICS, beginning=newest_lines(run_dir))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """List the lines of :func:`each_metric`."""
    return list(each_metric(run_dir))


def lines_up_to(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """List the lines up to a step, those that a run had written at its checkpoint.

    Raises:
        TrainingError: see :func:`each_metric`.
    """
    return [line for line in read_metrics(run_dir) if line["step"] <= step]
