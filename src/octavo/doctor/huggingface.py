"""The doctor in Hugging Face's ``Trainer``: ``Trainer(..., callbacks=[DoctorCallback()])``.

It looks at a model that ``octavo.convert`` has converted, every few optimizer steps, with all their micro-batches, and
writes what it finds to metrics.jsonl in the training's ``output_dir``, so that ``octavo doctor OUTPUT_DIR`` reads it,
while it trains and afterwards:

- "watched" and "statistics" lines of each look, see :mod:`octavo.doctor.series`;
- a "step" line where the Trainer logs: ``loss`` (its mean since the log before, null where that is not finite), ``lr``,
  ``grad_norm``;
- an "overflow" line of each step that a dynamic loss scale skipped;
- an "evaluation" line of each evaluation that has a loss.

A finding is printed when it is first seen, and again when it has become worse. Lines that cannot be written are left
out with a warning: nobody's training ends for it. A training that an exception ends during a look leaves the model
watched, since the Trainer tells nobody; :meth:`DoctorCallback.abandon`, or the next training's beginning, ends that
look. Needs ``transformers`` and ``accelerate``: octavo[hf].
"""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from octavo.curves import perplexity
from octavo.doctor.findings import Finding, Severity
from octavo.doctor.lines import METRICS, LineWriter, SampleLines, read_lines
from octavo.doctor.series import Sample
from octavo.doctor.watch import Watcher, watch
from octavo.errors import ConfigError
from octavo.files import write_atomically

__all__ = ["DoctorCallback"]

STEP_NAMES = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}  # Hugging Face's name: ours
EVALUATION_LOSS = "eval_loss"


class _UnfinishedStepError(Exception):
    """Thrown into a look at a step that did not end."""


class DoctorCallback(TrainerCallback):
    """Looks at a converted model while a ``transformers.Trainer`` trains it.

    Args:
        interval: optimizer steps from one look to the next, 1 or more. The first step is looked at too.
        keep: looks that findings are drawn from while it trains, 2 or more; the file holds all.
        tell: called with a line about each new finding.

    Raises:
        ConfigError: ``interval`` or ``keep`` is out of range; and when training begins, if no layer of the model is
            octavo's.

    Example:
        >>> DoctorCallback(interval=10).findings()
        []
    """

    def __init__(self, *, interval: int = 10, keep: int = 64, tell: Callable[[str], None] = print) -> None:
        super().__init__()
        for name, value, least in (("interval", interval, 1), ("keep", keep, 2)):
            if value < least:
                raise ConfigError(f"DoctorCallback's {name} must be a whole number of at least {least}, not {value!r}")
        self.interval, self.keep, self.tell = interval, keep, tell
        self.watcher: Watcher | None = None
        self._look = ExitStack()
        self._told: dict[tuple[str, str, str], Severity] = {}
        self._path = Path()
        self._samples, self._lines = SampleLines([]), LineWriter()
        self._tells = self._writes = False
        self._overflows_told = 0

    def findings(self) -> list[Finding]:
        """What the looks that are held show, worst first; nothing before the first."""
        return [] if self.watcher is None else self.watcher.findings()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Watch the model; lines of steps that are trained again are cut off."""
        del control
        self.abandon()
        self.watcher = watch(
            given["model"],
            _inner(given["optimizer"]),
            interval=self.interval,
            keep=self.keep,
            on_sample=self._write_sample,
        )
        self._told, self._overflows_told = {}, 0
        self._path = Path(args.output_dir or ".") / METRICS
        self._tells = self._writes = bool(state.is_world_process_zero)
        if self._writes:
            self._continue_file(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Begin to look, if the step is due."""
        del args, control, given
        self.abandon()
        self._look.enter_context(self._watcher().step(state.global_step + 1))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Write what the look found, and say what is new."""
        del args, control, given
        self._look.close()
        self._write_overflows()
        if self._watcher().is_due(state.global_step):
            self._tell_news()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Write a step's numbers, or an evaluation's."""
        del args, control, given
        values = {ours: _plain(logs[theirs]) for theirs, ours in STEP_NAMES.items() if logs and theirs in logs}
        if "loss" in values:
            self._write("step", state.global_step, values)
            self._watcher().steps.append({"kind": "step", "step": state.global_step, **values})
        if logs and EVALUATION_LOSS in logs:
            nats = _plain(logs[EVALUATION_LOSS])
            exponential = None if nats is None else _plain(perplexity(nats))
            self._write("evaluation", state.global_step, {"nats": nats, "perplexity": exponential})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Leave the model as it was."""
        del args, state, control, given
        self.abandon()

    def abandon(self) -> None:
        """Leave the model as it was, and forget the step that is looked at: it did not end."""
        look, self._look = self._look, ExitStack()
        unfinished = _UnfinishedStepError()
        look.__exit__(_UnfinishedStepError, unfinished, None)

    def _watcher(self) -> Watcher:
        if self.watcher is None:
            raise ConfigError("DoctorCallback saw no beginning of this training; give it to the Trainer before train()")
        return self.watcher

    def _continue_file(self, step: int) -> None:
        kept = [line for line in read_lines(self._path) if line["step"] <= step] if step else []
        self._samples, self._lines = SampleLines(kept), LineWriter()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, "".join(map(self._lines.line, kept)))
        except OSError as error:
            self._stop_writing(error)

    def _write_sample(self, sample: Sample) -> None:
        for kind, values in self._samples.of(sample):
            self._write(kind, sample.step, values)

    def _write_overflows(self) -> None:
        for line in self._watcher().overflows.lines:
            if line["step"] > self._overflows_told:
                self._overflows_told = line["step"]
                self._write("overflow", line["step"], {"loss_scale": line["loss_scale"]})

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if not self._writes:
            return
        line = self._lines.line({"kind": kind, "step": step, **values})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        """Later lines would not fit to those that are missing."""
        self._writes = False
        warnings.warn(
            f"DoctorCallback writes no more lines: {str(self._path)!r} cannot be written ({error}); findings are still "
            "told while it trains",
            stacklevel=2,
        )

    def _tell_news(self) -> None:
        order = list(Severity)
        for finding in self.findings() if self._tells else ():
            key = (finding.code, finding.path, finding.role)
            before = self._told.get(key)
            if before is None or order.index(finding.severity) < order.index(before):
                self._told[key] = finding.severity
                self.tell(f"octavo doctor: {finding}")


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer that takes the steps: accelerate wraps it, and hooks on the wrapper never run."""
    from accelerate.optimizer import AcceleratedOptimizer

    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def _plain(value: Any) -> float | None:
    """A finite number; JSON has no other."""
    number = float(value)
    return number if math.isfinite(number) else None
