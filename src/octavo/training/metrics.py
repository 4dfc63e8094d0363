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
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.doctor import Sample
from octavo.doctor.lines import METRICS, SampleLines, line_of, read_lines
from octavo.files import write_atomically
from octavo.parsing import parse_json
from octavo.training.tensorboard_events import TensorBoardEvents

__all__ = ["METRICS", "MetricsLog", "lines_up_to", "read_metrics"]

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
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._samples = SampleLines(kept)
        self._on_line = on_line
        self._file = path.open("a", encoding="utf-8")
        folder, first = run_dir / TENSORBOARD, (after_step or 0) + 1
        self._events = TensorBoardEvents(folder, purge_step=first, on_notice=on_notice)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line."""
        line = line_of(kind, step, values)
        self._file.write(line)
        self._file.flush()
        if self._on_line is not None:
            self._on_line(parse_json(line))
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


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl; none where there is no file. A torn last line, left by a kill, is passed over.

    Raises:
        TrainingError: another line is not what a run writes.
    """
    return read_lines(run_dir / METRICS)


def lines_up_to(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """What a run had written when it saved the checkpoint of a step.

    Raises:
        TrainingError: a line is not what a run writes.
    """
    return [line for line in read_metrics(run_dir) if line["step"] <= step]
