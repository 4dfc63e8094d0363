"""Sampling of a model's FP8 statistics in any training loop: ``octavo.doctor.watch``.

Every ``interval`` steps the tensors of each FP8 layer are compared with their codes, and the optimizer's step is
measured for each parameter. Other steps have no overhead. Sums stay on the model's device until the step ends and are
then copied at once. Memory grows with the number of layers but not of steps: the newest ``keep`` samples are stored,
and ``on_sample`` receives every sample.

A compiled model runs eagerly in sampled steps; the numbers are the same.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.convert import linear_layers
from octavo.doctor.attention_statistics import AttentionStatistics
from octavo.doctor.capture import Captures
from octavo.doctor.capture_scheduler import CaptureScheduler
from octavo.doctor.diagnose import diagnose
from octavo.doctor.expert_statistics import ExpertStatistics
from octavo.doctor.facts import layer_facts
from octavo.doctor.findings import Findings
from octavo.doctor.layer_recorder import LayerRecorder
from octavo.doctor.module_checks import alignments, watching_batch_norms
from octavo.doctor.optimizer_recorder import OptimizerRecorder
from octavo.doctor.overflows import Overflows
from octavo.doctor.ranks import RankComparison
from octavo.doctor.series import CastKey, ProductKey, Sample, Series, series_of
from octavo.doctor.statistics import CAST_FIELDS, cast_numbers, product_numbers
from octavo.doctor.tables import Floats, Key
from octavo.doctor.thresholds import Thresholds
from octavo.errors import ConfigError
from octavo.nn.scaled_layer import ScaledLayer
from octavo.scaling import ROLES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["StepNotes", "Watcher", "watch"]

MAX_STEPS = 1000


class StepNotes:
    """Numbers of a step that the training loop records.

    Attributes:
        loss: a number or a tensor [], in nats.
        values: other numbers by name, such as "grad_norm" and "loss_scale"; "lr" is read from the optimizer. Record a
            dynamic loss scale after its update: ``scaler.get_scale()`` after ``scaler.update()``.
    """

    def __init__(self) -> None:
        self.loss: float | Tensor | None = None
        self.values: dict[str, float] = {}


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    interval: int = 10,
    keep: int = 64,
    on_sample: Callable[[Sample], None] | None = None,
    captures: str | Path | Captures | None = None,
    group: "ProcessGroup | str | None" = None,
) -> "Watcher":
    """Watch ``model`` while it trains.

    Args:
        model: a model converted by ``octavo.convert`` or built from ``octavo.nn`` modules.
        optimizer: the optimizer, to measure updates relative to weights and to note the learning rate; None to skip
            them.
        interval: steps between sampled steps, 1 or more. The first step is sampled too.
        keep: number of samples to store, 2 or more; a finding says if it may have begun in dropped ones.
        on_sample: called with each sample when its step ends.
        captures: a folder for captures. The rules are then applied to the samples so far, and layers with findings are
            captured at the next sampled step, for :func:`octavo.doctor.replay`; None captures nothing.
        group: ranks whose statistics are taken together and whose scales are compared; all of them must sample the same
            steps. None is the default group of torch.distributed, if initialized; "alone" is this rank.

    Raises:
        ConfigError: ``interval`` or ``keep`` is out of range, ``group`` is a string other than "alone", or the model
            has no octavo layer.

    Example:
        >>> import octavo, octavo.doctor
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = octavo.convert(model, "tensorwise")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> watcher = watch(model, optimizer, interval=1)
        >>> for _ in range(2):
        ...     with watcher.step() as notes:
        ...         loss = model(torch.ones(4, 8)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         notes.loss = loss
        >>> [key.role for key in watcher.samples[0].casts if key.path == "0"]
        ['input', 'weight', 'grad_output']
        >>> watcher.findings()
        []
    """
    return Watcher(model, optimizer, interval=interval, keep=keep, on_sample=on_sample, captures=captures, group=group)


class Watcher:
    """Watcher of a model; see :func:`watch`.

    Attributes:
        samples: the newest ``keep`` samples, oldest first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        interval: int,
        keep: int,
        on_sample: Callable[[Sample], None] | None,
        captures: str | Path | Captures | None = None,
        group: "ProcessGroup | str | None" = None,
    ) -> None:
        integers: tuple[tuple[str, object, int], ...] = (("interval", interval, 1), ("keep", keep, 2))
        for name, value, least in integers:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"watch's {name} must be a whole number of at least {least}, not {value!r}")
        self.model, self.interval, self.on_sample = model, interval, on_sample
        self.layers = linear_layers(model)
        self.experts, self.attention = ExpertStatistics(model), AttentionStatistics(model)
        if not (self.layers or self.experts.layers or self.attention.has_recipe):
            raise ConfigError("no layer of this model is octavo's; call octavo.convert(model, recipe) before watching")
        _check_device(self.layers)
        self.ranks = RankComparison(self.layers, group)
        self.optimizer = None if optimizer is None else OptimizerRecorder(model, optimizer)
        self.overflows = Overflows(optimizer)
        capture_folder = captures if captures is None or isinstance(captures, Captures) else Captures(captures)
        self.captor = (
            None if capture_folder is None else CaptureScheduler(capture_folder, self.layers, interval=interval)
        )
        self.samples: deque[Sample] = deque(maxlen=keep)
        self._dropped = False
        self.steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)
        self.number = 0
        self._nonfinite = {path: layer.nonfinite_counts.tolist() for path, layer in self._counted.items()}

    @property
    def _counted(self) -> dict[str, ScaledLayer]:
        """Layers with counts of NaN and ±Inf: linear ones and those of experts."""
        return {**self.layers, **self.experts.layers}

    def is_due(self, number: int) -> bool:
        """True if the step with this number, counted from 1, is sampled."""
        return number == 1 or number % self.interval == 0

    @contextmanager
    def step(self, number: int | None = None, *, always: bool = False) -> Iterator[StepNotes]:
        """Context of one training step: forward, backward and the optimizer's step, with all micro-batches.

        Args:
            number: the step's number, counted from 1; None for the previous number plus one.
            always: sample the step regardless of its number.
        """
        self.number = self.number + 1 if number is None else number
        notes = StepNotes()
        is_sampled = always or self.is_due(self.number)
        with self.overflows.during_step(), self._recording_rate(notes):
            if is_sampled:
                with self._monitored_step() as finish:
                    yield notes
                self._store(finish())
            else:
                yield notes
        self._record_notes(notes)
        if is_sampled:
            self.overflows.read()
            if self.captor is not None:
                self.captor.update(self.findings, self.number)

    @contextmanager
    def _recording_rate(self, notes: StepNotes) -> Iterator[None]:
        """Note the largest learning rate of the optimizer's step; what the loop notes itself replaces it."""
        if self.overflows.optimizer is None:
            yield
            return

        def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
            notes.values["lr"] = max(float(group["lr"]) for group in optimizer.param_groups)

        handle = self.overflows.optimizer.register_step_post_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def capturing(self, paths: Iterable[str]) -> AbstractContextManager[None]:
        """Context of a forward and backward pass outside of steps that captures the layers at or below these paths.

        Nothing is measured. Without a folder for captures it has no effect.
        """
        return nullcontext() if self.captor is None else self.captor.capturing(paths, self.number)

    def findings(self, thresholds: Thresholds | None = None) -> Findings:
        """Findings in the stored samples, worst first."""
        return diagnose(self.series(), thresholds or Thresholds())

    def series(self) -> Series:
        """Series of the stored samples and of the newest 1,000 steps."""
        kept_from = self.samples[0].step if self._dropped else None
        return replace(series_of([*self.steps, *self.overflows.lines], list(self.samples)), kept_from=kept_from)

    @contextmanager
    def _monitored_step(self) -> Iterator[Callable[[], Sample]]:
        casts: dict[CastKey, Tensor] = {}
        products: dict[ProductKey, Tensor] = {}
        batch_norms: dict[str, Tensor] = {}
        parameters: dict[str, Tensor] = {}
        experts: dict[str, Tensor] = {}
        expert_casts: dict[CastKey, Tensor] = {}
        attention: dict[str, Tensor] = {}
        for path, layer in self.layers.items():
            recorder = LayerRecorder(path, casts, products)
            layer.watch = recorder if self.captor is None else self.captor.wrap(recorder, path, self.number)
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                watching_batch_norms(self.model, batch_norms),
                OptimizerRecorder.recording(self.optimizer, parameters),
                self.experts.recording(experts, expert_casts, casts),
                self.attention.recording(attention),
            ):
                yield lambda: self._sample(
                    casts, products, parameters, batch_norms, experts, expert_casts=expert_casts, attention=attention
                )
        finally:
            for layer in self.layers.values():
                layer.watch = None

    def _sample(
        self,
        casts: dict[CastKey, Tensor],
        products: dict[ProductKey, Tensor],
        parameters: dict[str, Tensor],
        batch_norms: dict[str, Tensor],
        experts: dict[str, Tensor],
        *,
        expert_casts: dict[CastKey, Tensor],
        attention: dict[str, Tensor],
    ) -> Sample:
        counts = {path: layer.nonfinite_counts for path, layer in self._counted.items()}
        sums_of_casts, sums_of_products, parameter_numbers, batch_norm_numbers, *others = _fetch(
            casts, products, parameters, batch_norms, alignments(self.model), counts, experts, expert_casts, attention
        )
        alignment_numbers, nonfinite_counts, expert_numbers, expert_cast_numbers, attention_numbers = others
        sums_of_casts, sums_of_products, rank_numbers = self.ranks.reduce(sums_of_casts, sums_of_products)
        cast_table, product_table = (
            _apply_formula(cast_numbers, sums_of_casts),
            _apply_formula(product_numbers, sums_of_products),
        )
        new_counts = self._new_counts(nonfinite_counts)
        column = CAST_FIELDS.index("nonfinite")
        for key, row in cast_table.items():
            row[column] = max(row[column], new_counts[key.path, key.role])
        modules = {"alignment": alignment_numbers, "batch_norm": batch_norm_numbers}
        numbers = {name: {path: float(x[0]) for path, x in table.items()} for name, table in modules.items()}
        if batch_norm_numbers:
            numbers["batch_norm_rows"] = {path: float(x[1]) for path, x in batch_norm_numbers.items()}
        return Sample(
            step=self.number,
            casts=cast_table,
            products=product_table,
            parameters=parameter_numbers,
            modules=numbers
            | rank_numbers
            | self.experts.numbers(expert_numbers)
            | self.experts.nonfinite(expert_cast_numbers, new_counts)
            | self.attention.numbers(attention_numbers),
            scalars={"gradient_to_noise": _gradient_to_noise(parameter_numbers, product_table)},
            layers={path: layer_facts(one, one.last_recipe or one.recipe) for path, one in self.layers.items()},
        )

    def _new_counts(self, counts: dict[str, Any]) -> dict[tuple[str, str], int]:
        """The layers' own counts of NaN and ±Inf since the previous sample, by path and role."""
        new_counts: dict[tuple[str, str], int] = {}
        for path, count in counts.items():
            before, self._nonfinite[path] = self._nonfinite[path], count.tolist()
            new_counts |= {(path, role): count[index] - before[index] for index, role in enumerate(ROLES)}
        return new_counts

    def _store(self, sample: Sample) -> None:
        self._dropped |= len(self.samples) == self.samples.maxlen
        self.samples.append(sample)
        if self.on_sample is not None:
            self.on_sample(sample)

    def _record_notes(self, notes: StepNotes) -> None:
        values = {name: float(value) for name, value in notes.values.items()}
        if notes.loss is not None:
            values["loss"] = notes.loss.item() if isinstance(notes.loss, Tensor) else float(notes.loss)
        self.steps.append({"kind": "step", "step": self.number, **values})
        self.overflows.note(self.number, values)


def _check_device(layers: dict[str, ScaledLayer]) -> None:
    """Raise if a layer is on the meta device."""
    meta_layers = [path for path, layer in layers.items() if layer.stored_weight.is_meta]
    if meta_layers:
        raise ConfigError(
            f"layer {meta_layers[0]!r} is on the meta device and has no numbers to measure; "
            "give the model its weights (model.to_empty(device=...), then load them) before watching"
        )


def _fetch(*tables: dict[Any, Tensor]) -> list[dict[Any, Any]]:
    """Copy all tensors from their device at once; return them as float64 arrays."""
    tensors = [tensor for table in tables for tensor in table.values()]
    if not tensors:
        return [{} for _ in tables]
    values = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu().numpy()
    parts = np.split(values, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    arrays = iter([part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
    return [{key: next(arrays).copy() for key in table} for table in tables]


def _apply_formula(formula: Callable[[Floats], Floats], sums: dict[Key, Floats]) -> dict[Key, Floats]:
    return dict(zip(sums, formula(np.stack(list(sums.values()))), strict=True)) if sums else {}


def _gradient_to_noise(parameters: dict[str, Any], products: dict[ProductKey, Any]) -> float:
    """Norm of the weights' gradients over that of the noise of their GEMMs; NaN without measured GEMMs."""
    signal = noise = 0.0
    for key, (sqnr, _) in products.items():
        numbers = parameters.get(f"{key.path}.weight" if key.path else "weight")
        if key.gemm == "grad_weight" and numbers is not None and math.isfinite(sqnr):
            signal += numbers[0] ** 2
            noise += numbers[0] ** 2 * 10 ** (-sqnr / 10)
    return math.sqrt(signal / noise) if noise > 0 and math.isfinite(signal) else math.nan
