"""Quantization-aware training of a language model, measured against baselines (``run_qat``).

| measured        | model                                                                  | with a baseline only |
|-----------------|------------------------------------------------------------------------|----------------------|
| bf16            | the original model                                                     |                      |
| fp8             | the original, quantized with scales from the training windows          |                      |
| bf16-tuned      | fine-tuned in BF16 on the same batches in the same order               | yes                  |
| fp8-of-tuned    | bf16-tuned, quantized                                                  | yes                  |
| fp8-by-data     | bf16-tuned, quantized with compensated rounding                        | yes, with by_data    |
| fp8-qat         | fine-tuned in quantization-aware training, and converted               |                      |

All of them run under BF16 autocast with FP32 master weights, other linears in octavo's "bf16"; with ``engine``,
those in FP8 run as that server does instead, its dtype and cache around the layers too. Losses are measured on
the same held-out windows, so their differences are paired (``octavo.training.comparison``).

Fine-tuning changes the perplexity more than FP8 does, so the cost of FP8 after it is the difference to ``bf16-tuned``,
which is trained on the text alone, without distillation.

When the casts begin, before the first step or after the steps in high precision, the model at that point becomes the
teacher, and ``octavo.calibrate`` computes the initial scales of its inputs.

With ``by_data`` the rounding of the weights is compensated on the training windows after the last step
(``octavo.quantization.compensate_rounding``). Doing so before training has no lasting effect: each step changes the
weights, which are then rounded to nearest again (docs/concepts/qat.md).
"""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.convert import ConversionReport, convert, read_by_others, restore
from octavo.curves import perplexity
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel, logits_of
from octavo.models.served_forward import served_forward
from octavo.nn import Linear
from octavo.nn.parameter_rounding import round_parameters
from octavo.nn.scaling_state import load_scaling_state, scaling_state
from octavo.numerics.cast_spec import check_member
from octavo.quantization.bf16 import bf16_autocast
from octavo.quantization.calibration.calibrate import calibrate
from octavo.quantization.calibration.compensated_rounding import compensate_rounding
from octavo.quantization.qat.linear import QATLinear, ScaleUpdate
from octavo.quantization.qat.prepare import HIGH_PRECISION, NO_SCALE, check_recipe, convert_qat, prepare_qat
from octavo.quantization.qat.tuning import TuneSettings, TuneStep, tune, window_nats
from octavo.recipes import Recipe
from octavo.recipes.engines import EngineProfile
from octavo.training.comparison import Gap, paired_gap

__all__ = ["BASELINE", "CALIBRATION_WINDOWS", "Phase", "QATResult", "QATSettings", "run_qat"]

Phase = Callable[..., None]  # (name, done, total, note="")
BEFORE, PLAIN_FP8, BASELINE, FP8_OF_BASELINE, QAT = "bf16", "fp8", "bf16-tuned", "fp8-of-tuned", "fp8-qat"
FP8_BY_DATA = "fp8-by-data"
IN_FP8 = (PLAIN_FP8, FP8_OF_BASELINE, FP8_BY_DATA, QAT)
CALIBRATION_WINDOWS = 128  # training windows for the inputs' scales
ROUNDING_TOKENS = 8192  # of training windows for compensated rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class QATSettings:
    """Settings of a run.

    Attributes:
        recipe: see :func:`octavo.prepare_qat`.
        scales: as for ``prepare_qat``; frozen and tracked scales start from ``octavo.calibrate``.
        clip_gradients: as for ``prepare_qat``.
        skip: as for ``prepare_qat``.
        convert_head: as for ``prepare_qat``.
        by_data: compensate the rounding of the weights after the last step.
        baseline: also tune a BF16 model.
        engine: as which the model computes around its layers in FP8, for a recipe of
            :func:`octavo.engines.served_recipe`; None runs them under autocast.
        tuning: steps, batches, rates, distillation.
    """

    recipe: Recipe
    scales: str = ScaleUpdate.TRACKED
    clip_gradients: bool = False
    skip: tuple[str, ...] = ()
    convert_head: bool = False
    by_data: bool = False
    baseline: bool = False
    engine: EngineProfile | None = None
    tuning: TuneSettings

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        check_member("scales", self.scales, tuple(ScaleUpdate))
        if self.engine is not None and self.scales == ScaleUpdate.LEARNED:
            raise ConfigError(
                "learned scales are parameters, which are rounded as a server's are; use scales='tracked'"
            )
        tuning = self.tuning
        if self.starts_scales_at_first_batch and tuning.moving_steps == tuning.high_precision_steps:
            raise ConfigError(
                f"learned scales start at the first batch that is cast, but with a freeze_share of "
                f"{tuning.freeze_share} they are frozen before it; lower it, or use scales='frozen'"
            )

    @property
    def starts_scales_at_first_batch(self) -> bool:
        """True if static scales are initialised by the first batch, not by a calibration."""
        return self.scales == ScaleUpdate.LEARNED and self.recipe.has_static_input


@dataclass(frozen=True, slots=True, kw_only=True)
class QATResult:
    """Result of a run.

    Attributes:
        language_model: tuned and converted; only the layers in ``report`` differ in class from the original.
        report: of the conversion.
        settings: of the run.
        windows: mean held-out loss of each window, by measured model.
        steps: of each tuning, in order.
    """

    language_model: LanguageModel
    report: ConversionReport
    settings: QATSettings
    windows: dict[str, tuple[float, ...]]
    steps: dict[str, tuple[TuneStep, ...]]

    @property
    def reference(self) -> str:
        """Name of the model that the others are compared with."""
        return BASELINE if BASELINE in self.windows else BEFORE

    def perplexity(self, name: str) -> float:
        """Exponential of the mean held-out loss; infinite if it overflows."""
        losses = self.windows[name]
        return perplexity(math.fsum(losses) / len(losses))

    def gap(self, name: str, beside: str | None = None) -> Gap:
        """Paired loss difference to another model, by default the reference."""
        return paired_gap(self.windows[name], self.windows[beside or self.reference])


def run_qat(
    source: LanguageModel,
    settings: QATSettings,
    *,
    training: Tensor,
    held_out: Tensor,
    on_phase: Phase = lambda *_, **__: None,
) -> QATResult:
    """Tune copies of a model and measure them; the model itself is not changed.

    Args:
        source: in FP32.
        settings: of the run.
        training: windows to tune on, int64 [at least ``settings.tuning.windows``, context].
        held_out: windows to measure on, int64 [count, length].
        on_phase: progress callback.

    Raises:
        ConfigError: invalid for :func:`octavo.prepare_qat` or :func:`octavo.quantization.qat.tuning.tune`.
        NonFiniteLossError: a loss was not finite.
    """
    run = _QATRun(source, settings, training, held_out, on_phase)
    before = run.bf16_copy_of(source.model)
    plain = run.quantized_copy(before)  # fails early on a model that cannot be prepared
    run.measure(BEFORE, before)
    run.measure(PLAIN_FP8, plain)
    del plain
    if settings.baseline:
        run.tune_baseline()
    student, report = run.train_for_fp8()
    run.measure(QAT, student)
    for path, layer in list(student.named_modules()):
        if isinstance(layer, Linear) and path not in report.converted:
            restore(layer)
    return QATResult(
        language_model=replace(source, model=student),
        report=report,
        settings=settings,
        windows=run.windows,
        steps=run.steps,
    )


class _QATRun:
    """State and steps of a run."""

    def __init__(
        self, source: LanguageModel, settings: QATSettings, training: Tensor, held_out: Tensor, on_phase: Phase
    ) -> None:
        self.source, self.settings, self.on_phase = source.model, settings, on_phase
        device = next(self.source.parameters()).device
        self.training, self.held_out = training.to(device), held_out.to(device)
        self.windows: dict[str, tuple[float, ...]] = {}
        self.steps: dict[str, tuple[TuneStep, ...]] = {}

    @property
    def autocast(self) -> torch.autocast:
        return bf16_autocast(self.training.device)

    def surroundings(self, name: str, model: nn.Module) -> AbstractContextManager[object]:
        """Reusable context of the forward pass of a measured model."""
        engine = self.settings.engine
        return self.autocast if engine is None or name not in IN_FP8 else served_forward(model, engine)

    def bf16_copy_of(self, model: nn.Module) -> nn.Module:
        """Copy with all linears in BF16."""
        copied = copy.deepcopy(model)
        restore(copied)
        convert(copied, HIGH_PRECISION, convert_head=True)
        return copied.eval()

    def measure(self, name: str, model: nn.Module) -> None:
        """Record a model's held-out losses."""
        self.windows[name] = window_nats(
            model,
            self.held_out,
            surroundings=self.surroundings(name, model),
            on_window=lambda done, total: self.on_phase(f"evaluate {name}", done, total),
        )

    def quantized_copy(self, model: nn.Module, *, by_data: bool = False) -> nn.Module:
        """Copy of a BF16 model, quantized without training."""
        quantized = self._prepared(model, scales=ScaleUpdate.FROZEN)
        self._load_input_scales(quantized, model)
        if by_data:
            self._compensate_rounding(quantized)
        _convert_all(quantized)
        return quantized

    def tune_baseline(self) -> None:
        """Tune a copy of the source in BF16; measure it and its quantized copies."""
        tuned = self.bf16_copy_of(self.source)
        self._tune(BASELINE, tuned, replace(self.settings.tuning, distill=0.0))
        self.measure(BASELINE, tuned)
        self.measure(FP8_OF_BASELINE, self.quantized_copy(tuned))
        if self.settings.by_data:
            self.measure(FP8_BY_DATA, self.quantized_copy(tuned, by_data=True))

    def train_for_fp8(self) -> tuple[nn.Module, ConversionReport]:
        """Copy of the source after quantization-aware training, converted."""
        student = self._prepared(self.source, scales=self.settings.scales)
        teachers: list[nn.Module] = []

        def before_casts() -> None:
            teachers.append(self._bf16_copy(student))
            if not self.settings.starts_scales_at_first_batch:
                self._load_input_scales(student, teachers[0])

        def teach(tokens: Tensor) -> Tensor:
            with self.autocast:
                return logits_of(teachers[0], tokens)

        self._tune(QAT, student, self.settings.tuning, teacher=teach, before_casts=before_casts)
        if self.settings.engine is not None:
            round_parameters(student, self.settings.engine.activations)  # what is saved casts to the codes of training
        if self.settings.by_data:
            self._compensate_rounding(student)
        return student, _convert_all(student)

    def _tune(self, name: str, model: nn.Module, settings: TuneSettings, **options: Any) -> None:
        """Tune a copy in place and record its steps."""
        done: list[TuneStep] = []

        def on_step(step: TuneStep) -> None:
            done.append(step)
            self.on_phase(f"tune {name}", step.step, settings.steps, f"loss {step.loss:.3f}")

        self.on_phase(f"tune {name}", 0, settings.steps)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)  # for the model's own random numbers, such as dropout masks
            around = self.surroundings(name, model)
            tune(model, self.training, settings, surroundings=around, on_step=on_step, **options)
        self.steps[name] = tuple(done)

    def _prepared(self, model: nn.Module, *, scales: str) -> nn.Module:
        """Copy prepared for quantization-aware training; other layers run in BF16."""
        prepared = copy.deepcopy(model)
        restore(prepared)
        prepare_qat(
            prepared,
            self.settings.recipe,
            scales=scales,
            clip_gradients=self.settings.clip_gradients,
            skip=self.settings.skip,
            convert_head=self.settings.convert_head,
        )
        convert(prepared, HIGH_PRECISION, convert_head=True)
        return prepared.eval()

    def _bf16_copy(self, prepared: nn.Module) -> nn.Module:
        """BF16 copy of the source with the current weights of a prepared model."""
        model = self.bf16_copy_of(self.source)
        weights = prepared.state_dict()
        model.load_state_dict({key: weights[key] for key in model.state_dict()})
        return model

    def _load_input_scales(self, prepared: nn.Module, in_bf16: nn.Module) -> None:
        """Calibrate the static inputs of a prepared model using its BF16 copy."""
        if self.settings.recipe.has_static_input:
            load_scaling_state(prepared, scaling_state(prepared) | self._input_scales(in_bf16))

    def _compensate_rounding(self, prepared: nn.Module) -> None:
        windows = self._sample_windows(-(-ROUNDING_TOKENS // self.training.shape[1]))
        with self.autocast:
            compensate_rounding(prepared, windows, on_batch=partial(self.on_phase, "round by data"))
        shared = read_by_others(prepared)
        if unchanged := [path for path in shared if isinstance(prepared.get_submodule(path), QATLinear)]:
            note = f"not {', '.join(unchanged)}: {shared[unchanged[0]]}"
            self.on_phase("round by data", len(windows), len(windows), note)

    def _input_scales(self, model: nn.Module) -> dict[str, Tensor]:
        """Input scales by state key, from ``octavo.calibrate`` on training windows."""
        with self.autocast:
            calibration = calibrate(
                model,
                self._sample_windows(CALIBRATION_WINDOWS),
                skip=self.settings.skip,
                convert_head=self.settings.convert_head,
                on_batch=partial(self.on_phase, "calibrate"),
            )
        return {f"{path}.input.scale": scale for path, scale in calibration.input_scales.items()}

    def _sample_windows(self, count: int) -> list[Tensor]:
        """``count`` evenly spaced training windows as batches of one; all if there are fewer."""
        return [window[None] for window in self.training[:: max(1, len(self.training) // count)][:count]]


def _convert_all(prepared: nn.Module) -> ConversionReport:
    """Convert a prepared model; raise if a layer stays plain, which would then be measured as FP8."""
    report = convert_qat(prepared)
    if unreached := [path for path, why in report.skipped.items() if why == NO_SCALE]:
        raise ConfigError(
            f"no training window reaches layer {unreached[0]!r}, so its input has no scale; leave it out with skip, or "
            "give more windows"
        )
    return report
