"""A run's numbers on disk: metrics.jsonl, and TensorBoard events where the library is there.

metrics.jsonl has one JSON object a line, written and flushed as it happens:

    {"kind": "evaluation", "step": 0, "nats": 7.6, "perplexity": 2012.3}
    {"kind": "step", "step": 1, "loss": 7.6, "lr": 1e-4, "grad_norm": 2.1, "tokens": 1024, "seconds": 0.4, "threads": 2}

A perplexity that float64 does not hold, of a loss beyond 709 nats, is null.

With a loss scale, a "step" also has ``loss_scale``, and one that had to be made again with a smaller scale leaves a
line of its own, {"kind": "overflow", "step": 7, "loss_scale": 65536.0}, with the scale that was too large.

Where a phase of another recipe begins (octavo/training/precision_schedule.py), its first step has a line before its
own, {"kind": "precision", "step": 321, "recipe": "tensorwise"}.

A run of an FP8 recipe is looked at every ``statistics_interval`` steps: the lines "watched" and "statistics" are
described in octavo/doctor/series.py. A run that broke ends with {"kind": "failure", "step": 8, "loss": null,
"grad_norm": null, "tensor": "output of …"}: the first non-finite tensor, where a replay of the step found one.

With the autopilot there are "autopilot" lines, described in octavo/training/autopilot_journal.py, and lines {"kind":
"probation", "step": 90, "path": …, "number": 1, "names": …, "values": …} that have what "watched" and "statistics"
have, of one layer under the recipe that it would run without the act of that number.

``seconds`` is the one field that depends on the machine's mood; all others of a run that was interrupted and resumed
with the same number of CPU ``threads`` equal those of an uninterrupted one. Lines after the checkpoint that a run
resumes from are cut off first.

Each line has the ``sha256`` of octavo.doctor.metrics_lines, and each checkpoint records which lines there were when it
was saved: a changed line is refused, and so is a file with fewer lines than the newest checkpoint records.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.doctor import Sample
from octavo.doctor.metrics_lines import METRICS, LinesWritten, LineWriter, SampleLines, each_line
from octavo.files import write_atomically
from octavo.parsing import parse_json
from octavo.training.checkpoint import newest_lines
from octavo.training.tensorboard_events import TensorBoardEvents

__all__ = ["METRICS", "MetricsLog", "each_metric", "lines_up_to", "read_metrics"]

TENSORBOARD = "tensorboard"
CURVES = {"step": ("loss", "lr", "grad_norm"), "evaluation": ("nats", "perplexity"), "overflow": ("loss_scale",)}


class MetricsLog:
    """Appends to metrics.jsonl and to TensorBoard's events.

    Args:
        run_dir: the run's folder.
        after_step: the step of the checkpoint that the run continues from, 0 for a new one; later lines are cut off,
            and without a checkpoint (None) all.
        on_line: called with each line as it will be read back.
        on_notice: called with a sentence where TensorBoard's events cannot be written; the lines are, all the same.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        after_step: int | None,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        path = run_dir / METRICS
        kept = [] if after_step is None else lines_up_to(run_dir, after_step)
        self._lines = LineWriter()
        write_atomically(path, "".join(map(self._lines.line, kept)))
        self._samples = SampleLines(kept)
        self._on_line = on_line
        self._file = path.open("a", encoding="utf-8")
        folder, first = run_dir / TENSORBOARD, (after_step or 0) + 1
        self._events = TensorBoardEvents(folder, purge_step=first, on_notice=on_notice)

    def on_disk(self) -> LinesWritten:
        """Wait until the lines that are written are on the disk, and say which they are."""
        os.fsync(self._file.fileno())
        return self._lines.written

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line."""
        line = self._lines.line({"kind": kind, "step": step, **values})
        self._file.write(line)
        self._file.flush()
        if self._on_line is not None:
            self._on_line({key: value for key, value in parse_json(line).items() if key != "sha256"})
        shown = {name: values[name] for name in CURVES.get(kind, ()) if values[name] is not None}
        self._events.add(kind, step, shown)

    def write_sample(self, sample: Sample) -> None:
        """Append what a look at the model found: names where they are new, then numbers."""
        for kind, values in self._samples.of(sample):
            self.write(kind, sample.step, **values)
        self._events.add_together(sample.step, sample.scalars_by_name())

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._events.close()


def each_metric(run_dir: Path) -> Iterator[dict[str, Any]]:
    """All whole lines of metrics.jsonl, one at a time; none where there is no file.

    A torn last line, left by a kill, is passed over.

    Raises:
        TrainingError: another line is not what the run wrote, or lines are missing that there were when its newest
            checkpoint was saved.
        CheckpointError: that checkpoint is damaged.
    """
    return each_line(run_dir / METRICS, beginning=newest_lines(run_dir))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """What :func:`each_metric` yields."""
    return list(each_metric(run_dir))


def lines_up_to(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """What a run had written when it saved the checkpoint of a step.

    Raises:
        TrainingError: see :func:`each_metric`.
    """
    return [line for line in read_metrics(run_dir) if line["step"] <= step]
