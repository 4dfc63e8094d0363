"""The doctor in Hugging Face's ``Trainer``: ``Trainer(..., callbacks=[DoctorCallback()])``.

The callback samples a model converted by ``octavo.convert`` every few optimizer steps, with all micro-batches, and
writes statistics to metrics.jsonl in the training's ``output_dir``, which ``octavo doctor OUTPUT_DIR`` reads during
and after training:

- "watched" and "statistics" lines for each sampled step, see :mod:`octavo.doctor.series`;
- a "step" line for each step: ``loss`` (null if not finite), ``lr`` of the optimizer, and ``grad_norm`` where the
  Trainer logs it;
- an "overflow" line for each step that a dynamic loss scale skipped;
- an "evaluation" line for each evaluation with a loss.

Beside it, trainer_settings.json has the settings that a reference run must share.

The losses of all steps are read from their device together, when a step is sampled or the Trainer logs. Events that no
Trainer calls show no losses; the "step" lines are then those of the logs.

A finding is printed when it first appears and again when its severity increases. If lines cannot be written, a warning
is issued and training continues. If an exception ends training during a sampled step, the model stays watched, since
the Trainer does not notify callbacks; :meth:`DoctorCallback.abandon` or the start of the next training ends that step.
Needs ``transformers`` and ``accelerate``: octavo[hf].
"""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from octavo.curves import perplexity
from octavo.doctor.findings import Finding, Severity
from octavo.doctor.metrics_lines import METRICS, LineWriter, SampleLines, read_lines
from octavo.doctor.series import Sample
from octavo.doctor.trainer_losses import TrainerLosses, calling_object
from octavo.doctor.trainer_settings import write_trainer_settings
from octavo.doctor.watch import Watcher, watch
from octavo.errors import ConfigError
from octavo.files import write_atomically

__all__ = ["DoctorCallback"]

STEP_NAMES = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}  # Hugging Face's names to ours
EVALUATION_LOSS = "eval_loss"


class _UnfinishedStepError(Exception):
    """Raised into the context of a sampled step that did not finish."""


class DoctorCallback(TrainerCallback):
    """Watches a converted model while a ``transformers.Trainer`` trains it.

    Args:
        interval: optimizer steps between sampled steps, 1 or more. The first step is sampled too.
        keep: number of newest samples that findings during training are based on, 2 or more; the file holds all.
        tell: called with one line of text for each new finding.

    Raises:
        ConfigError: ``interval`` or ``keep`` is out of range; or, when training starts, the model has no octavo layer.

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
        self._sampled_step = ExitStack()
        self._reported: dict[tuple[str, str, str], Severity] = {}
        self._path = Path()
        self._samples, self._lines = SampleLines([]), LineWriter()
        self._reports = self._writes = False
        self._last_overflow = 0
        self._losses = TrainerLosses()
        self._steps: list[tuple[dict[str, Any], Tensor | None]] = []  # lines to be written, and losses to be read
        self._sampled: list[dict[str, Any]] = []

    def findings(self) -> list[Finding]:
        """Findings in the newest ``keep`` samples, worst first; empty before the first sample."""
        return [] if self.watcher is None else self.watcher.findings()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Start to watch the model; lines of steps that will be repeated are removed from the file."""
        del control
        self.abandon()
        self.watcher = watch(
            given["model"],
            _unwrap(given["optimizer"]),
            interval=self.interval,
            keep=self.keep,
            on_sample=self._queue_sample,
        )
        self._reported, self._last_overflow, self._steps, self._sampled = {}, 0, [], []
        self._losses.attach(calling_object(Trainer))
        self._path = Path(args.output_dir or ".") / METRICS
        self._reports = self._writes = bool(state.is_world_process_zero)
        if self._writes:
            self._continue_file(args, state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Start to sample the step if it is due."""
        del args, control, given
        self._discard_step()
        self._sampled_step.enter_context(self._watcher().step(state.global_step + 1))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Write the sample and report new findings."""
        del args, control, given
        self._sampled_step.close()
        self._steps.append((self._watcher().steps[-1], self._losses.take()))
        if self._watcher().is_due(state.global_step):
            self._write_until(state.global_step - 1)  # the Trainer may log numbers of this step
            self._report_new_findings()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Write the numbers of a step or an evaluation."""
        del args, control, given
        values = {ours: _finite_or_none(logs[theirs]) for theirs, ours in STEP_NAMES.items() if logs and theirs in logs}
        if "loss" in values:
            if not self._steps:
                self._watcher().steps.append({"kind": "step", "step": state.global_step})
                self._steps.append((self._watcher().steps[-1], None))
            line, _ = self._steps[-1]
            line |= values | line
            self._write_until(state.global_step)
        if logs and EVALUATION_LOSS in logs:
            self._write_until(state.global_step)
            nats = _finite_or_none(logs[EVALUATION_LOSS])
            exponential = None if nats is None else _finite_or_none(perplexity(nats))
            self._write("evaluation", state.global_step, nats=nats, perplexity=exponential)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Stop watching the model."""
        del args, control, given
        if self.watcher is not None:
            self._write_until(state.global_step)
        self.abandon()

    def abandon(self) -> None:
        """Stop watching the model and discard a sampled step that has not finished."""
        self._losses.detach()
        self._discard_step()

    def _discard_step(self) -> None:
        """Forget a step that has not finished."""
        self._losses.take()
        sampled_step, self._sampled_step = self._sampled_step, ExitStack()
        unfinished = _UnfinishedStepError()
        sampled_step.__exit__(_UnfinishedStepError, unfinished, None)

    def _watcher(self) -> Watcher:
        if self.watcher is None:
            raise ConfigError(
                "DoctorCallback was not notified of the start of training; pass it to the Trainer before train()"
            )
        return self.watcher

    def _continue_file(self, args: TrainingArguments, step: int) -> None:
        lines = [line for line in read_lines(self._path) if line["step"] <= step] if step else []
        self._samples, self._lines = SampleLines(lines), LineWriter()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, "".join(map(self._lines.line, lines)))
            write_trainer_settings(self._path.parent, args)
        except OSError as error:
            self._stop_writing(error)

    def _queue_sample(self, sample: Sample) -> None:
        self._sampled += [{"kind": kind, "step": sample.step, **values} for kind, values in self._samples.of(sample)]

    def _write_until(self, step: int) -> None:
        """Write the samples, the overflows, and the steps up to this one, in order; waits for the device."""
        overflows = self._watcher().overflows
        overflows.read()
        losses = [loss.float() for _, loss in self._steps if loss is not None]
        values = iter(torch.stack(losses).tolist() if losses else ())
        for line, loss in self._steps:
            line.update({} if loss is None else {"loss": _finite_or_none(next(values))})
        new_overflows = [line for line in overflows.lines if line["step"] > self._last_overflow]
        steps = [line for line, _ in self._steps if line["step"] <= step and "loss" in line]
        for line in sorted([*self._sampled, *new_overflows, *steps], key=lambda one: one["step"]):
            self._write(**line)
        self._last_overflow = max((line["step"] for line in overflows.lines), default=0)
        self._steps = [(line, None) for line, _ in self._steps if line["step"] > step]
        self._sampled = []

    def _write(self, kind: str, step: int, **values: Any) -> None:
        if not self._writes:
            return
        line = self._lines.line({"kind": kind, "step": step, **values})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        """Stop writing: later lines would not follow from the missing ones."""
        self._writes = False
        warnings.warn(
            f"DoctorCallback writes no more lines: {str(self._path)!r} cannot be written ({error}); findings are still "
            "reported during training",
            stacklevel=2,
        )

    def _report_new_findings(self) -> None:
        order = list(Severity)
        for finding in self.findings() if self._reports else ():
            key = (finding.code, finding.path, finding.role)
            before = self._reported.get(key)
            if before is None or order.index(finding.severity) < order.index(before):
                self._reported[key] = finding.severity
                self.tell(f"octavo doctor: {finding}")


def _unwrap(optimizer: Any) -> torch.optim.Optimizer | None:
    """The wrapped optimizer: accelerate wraps it, and hooks on the wrapper never run."""
    from accelerate.optimizer import AcceleratedOptimizer

    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def _finite_or_none(value: Any) -> float | None:
    """A finite number, or None: JSON has neither NaN nor infinity."""
    number = float(value)
    return number if math.isfinite(number) else None
