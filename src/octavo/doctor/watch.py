"""``octavo.doctor.watch``: look at a model while it trains, in any loop.

Every ``interval`` steps each FP8 layer's tensors are measured beside the codes that were made of them, and the
optimizer's step is measured parameter by parameter. The other steps pay nothing. What is measured stays on the model's
device until the step ends and is fetched in one copy. Memory grows with the number of layers, not of steps: the newest
``keep`` samples are held, and whoever wants all of them takes each as it comes (``on_sample``).

A compiled model runs eagerly in a step that is looked at; the numbers are the same.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.doctor.captor import Captor
from octavo.doctor.capture import Captures
from octavo.doctor.diagnose import diagnose
from octavo.doctor.facts import layer_facts
from octavo.doctor.findings import Finding
from octavo.doctor.layer_recorder import LayerRecorder
from octavo.doctor.module_checks import alignments, watching_batch_norms
from octavo.doctor.optimizer_recorder import OptimizerRecorder
from octavo.doctor.overflows import Overflows
from octavo.doctor.ranks import RankComparison
from octavo.doctor.series import CastKey, ProductKey, Sample, series_of
from octavo.doctor.statistics import CAST_FIELDS, cast_numbers, product_numbers
from octavo.doctor.tables import Floats, Key
from octavo.doctor.thresholds import Thresholds
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.scaling import ROLES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["StepNotes", "Watcher", "watch"]

STEPS_KEPT = 1000


class StepNotes:
    """What the loop says of a step.

    Attributes:
        loss: a number or a tensor [], in nats.
        values: other numbers by name, such as "lr", "grad_norm" and "loss_scale", which with a dynamic scale is best
            taken after its update: ``scaler.get_scale()`` after ``scaler.update()``.
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
    """Look at ``model`` while it trains.

    Args:
        model: converted by ``octavo.convert``, or built of ``octavo.nn`` modules.
        optimizer: to measure updates against weights; without it they are not measured.
        interval: steps from one look to the next, 1 or more. The first step is looked at too.
        keep: samples that are held, 2 or more.
        on_sample: called with each sample when its step ends.
        captures: a folder. The rules judge the looks so far then, and a layer in which they find something is captured
            there at the next look, for :func:`octavo.doctor.replay`; None captures nothing.
        group: ranks that should cast alike; all of them must look at the same steps. None is the default group, where
            torch.distributed is running; "alone" compares nothing.

    Raises:
        ConfigError: ``interval`` or ``keep`` is out of range, ``group`` is another text, or no layer of the model is
            octavo's.

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
    """See :func:`watch`.

    Attributes:
        samples: the newest ``keep``, oldest first.
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
        given: tuple[tuple[str, object, int], ...] = (("interval", interval, 1), ("keep", keep, 2))
        for name, value, least in given:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"watch's {name} must be a whole number of at least {least}, not {value!r}")
        self.model, self.interval, self.on_sample = model, interval, on_sample
        self.layers = {path: module for path, module in model.named_modules() if isinstance(module, Linear)}
        if not self.layers:
            raise ConfigError("no layer of this model is octavo's; call octavo.convert(model, recipe) before watching")
        _check_memory(self.layers)
        self.ranks = RankComparison(self.layers, group)
        self.optimizer = None if optimizer is None else OptimizerRecorder(model, optimizer)
        self.overflows = Overflows(optimizer)
        store = captures if captures is None or isinstance(captures, Captures) else Captures(captures)
        self.captor = None if store is None else Captor(store, self.layers, interval=interval)
        self.samples: deque[Sample] = deque(maxlen=keep)
        self.steps: deque[dict[str, Any]] = deque(maxlen=STEPS_KEPT)
        self.number = 0
        self._nonfinite = {path: layer.nonfinite_counts.tolist() for path, layer in self.layers.items()}

    def is_due(self, number: int) -> bool:
        """Whether the step of that number, from 1 on, is looked at."""
        return number == 1 or number % self.interval == 0

    @contextmanager
    def step(self, number: int | None = None, *, always: bool = False) -> Iterator[StepNotes]:
        """One step of training: forward, backward and the optimizer's step, with all micro-batches.

        Args:
            number: the step's, from 1 on; None is one more than the last.
            always: look at it whatever its number.
        """
        self.number = self.number + 1 if number is None else number
        notes = StepNotes()
        is_looked_at = always or self.is_due(self.number)
        with self.overflows.during_step():
            if is_looked_at:
                with self._looking() as finish:
                    yield notes
                self._keep(finish())
            else:
                yield notes
        self._note(notes)
        if is_looked_at:
            self.overflows.read()
            if self.captor is not None:
                self.captor.look(self.findings, self.number)

    def capturing(self, paths: Iterable[str]) -> AbstractContextManager[None]:
        """A forward and a backward pass besides the steps, in which the layers at, or in, these paths are captured.

        Nothing is measured. It does nothing where nothing is captured.
        """
        return nullcontext() if self.captor is None else self.captor.capturing(paths, self.number)

    def findings(self, thresholds: Thresholds | None = None) -> list[Finding]:
        """What the samples that are held show, worst first."""
        lines = [*self.steps, *self.overflows.lines]
        return diagnose(series_of(lines, list(self.samples)), thresholds or Thresholds())

    @contextmanager
    def _looking(self) -> Iterator[Callable[[], Sample]]:
        casts: dict[CastKey, Tensor] = {}
        products: dict[ProductKey, Tensor] = {}
        batch_norms: dict[str, Tensor] = {}
        parameters: dict[str, Tensor] = {}
        for path, layer in self.layers.items():
            recorder = LayerRecorder(path, casts, products)
            layer.watch = recorder if self.captor is None else self.captor.around(recorder, path, self.number)
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                watching_batch_norms(self.model, batch_norms),
                OptimizerRecorder.recording(self.optimizer, parameters),
            ):
                yield lambda: self._sample(casts, products, parameters, batch_norms)
        finally:
            for layer in self.layers.values():
                layer.watch = None

    def _sample(
        self,
        casts: dict[CastKey, Tensor],
        products: dict[ProductKey, Tensor],
        parameters: dict[str, Tensor],
        batch_norms: dict[str, Tensor],
    ) -> Sample:
        counts = {path: layer.nonfinite_counts for path, layer in self.layers.items()}
        sums, sums_of_products, of_parameters, of_norms, of_pairs, of_counts = _fetched(
            casts, products, parameters, batch_norms, alignments(self.model), counts
        )
        of_casts, of_products = _numbers(cast_numbers, sums), _numbers(product_numbers, sums_of_products)
        self._count_nonfinite(of_casts, of_counts)
        modules = {"alignment": of_pairs, "batch_norm": of_norms}
        numbers = {name: {path: float(x[0]) for path, x in table.items()} for name, table in modules.items()}
        if of_norms:
            numbers["batch_norm_rows"] = {path: float(x[1]) for path, x in of_norms.items()}
        return Sample(
            step=self.number,
            casts=of_casts,
            products=of_products,
            parameters=of_parameters,
            modules=numbers | self.ranks.ratios(of_casts),
            scalars={"gradient_to_noise": _gradient_to_noise(of_parameters, of_products)},
            layers={path: layer_facts(one, one.last_recipe or one.recipe) for path, one in self.layers.items()},
        )

    def _count_nonfinite(self, casts: dict[CastKey, Any], counts: dict[str, Any]) -> None:
        """Let ``nonfinite`` say what a role has held since the last look, where the layers counted more."""
        column = CAST_FIELDS.index("nonfinite")
        since: dict[tuple[str, str], int] = {}
        for path, now in counts.items():
            before, self._nonfinite[path] = self._nonfinite[path], now.tolist()
            since |= {(path, role): now[index] - before[index] for index, role in enumerate(ROLES)}
        for key, numbers in casts.items():
            numbers[column] = max(numbers[column], since[key.path, key.role])

    def _keep(self, sample: Sample) -> None:
        self.samples.append(sample)
        if self.on_sample is not None:
            self.on_sample(sample)

    def _note(self, notes: StepNotes) -> None:
        values = {name: float(value) for name, value in notes.values.items()}
        if notes.loss is not None:
            values["loss"] = notes.loss.item() if isinstance(notes.loss, Tensor) else float(notes.loss)
        self.steps.append({"kind": "step", "step": self.number, **values})
        self.overflows.note(self.number, values)


def _check_memory(layers: dict[str, Linear]) -> None:
    """Refuse layers whose numbers nobody can look at."""
    without = [path for path, layer in layers.items() if layer.weight.is_meta]
    if without:
        raise ConfigError(
            f"layer {without[0]!r} is on the meta device and has no numbers to look at; "
            "give the model its weights (model.to_empty(device=...), then load them) before watching"
        )


def _fetched(*tables: dict[Any, Tensor]) -> list[dict[Any, Any]]:
    """The tables' tensors as float64 arrays, in one copy from their device."""
    tensors = [tensor for table in tables for tensor in table.values()]
    if not tensors:
        return [{} for _ in tables]
    values = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu().numpy()
    parts = np.split(values, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    arrays = iter([part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
    return [{key: next(arrays).copy() for key in table} for table in tables]


def _numbers(formula: Callable[[Floats], Floats], sums: dict[Key, Floats]) -> dict[Key, Floats]:
    return dict(zip(sums, formula(np.stack(list(sums.values()))), strict=True)) if sums else {}


def _gradient_to_noise(parameters: dict[str, Any], products: dict[ProductKey, Any]) -> float:
    """Norm of the weights' gradients over that of the noise their GEMMs add; NaN where no GEMM is known."""
    signal = noise = 0.0
    for key, (sqnr, _) in products.items():
        numbers = parameters.get(f"{key.path}.weight" if key.path else "weight")
        if key.gemm == "grad_weight" and numbers is not None and math.isfinite(sqnr):
            signal += numbers[0] ** 2
            noise += numbers[0] ** 2 * 10 ** (-sqnr / 10)
    return math.sqrt(signal / noise) if noise > 0 and math.isfinite(signal) else math.nan
