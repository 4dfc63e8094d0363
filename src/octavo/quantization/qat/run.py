"""``run_qat``: what quantisation-aware training buys a language model, and the model it leaves.

| measured        | what it is                                                             | with a baseline only |
|-----------------|------------------------------------------------------------------------|----------------------|
| bf16            | the model as it came                                                   |                      |
| fp8             | the same, quantised as it is: its scales from the training windows     |                      |
| bf16-tuned      | fine-tuned in BF16 on the same batches in the same order               | yes                  |
| fp8-of-tuned    | that one, quantised as it is                                           | yes                  |
| fp8-by-data     | the same, its weights rounded by data                                  | yes, if QAT's are    |
| fp8-qat         | fine-tuned in quantisation-aware training, and converted               |                      |

All of them run in the same surroundings: BF16 autocast over FP32 master weights, other linears in octavo's "bf16". The
losses are taken on the same held-out windows, so their differences are paired (``octavo.training.comparison``).

A plain fine-tune moves the perplexity further than FP8 does, so only ``bf16-tuned`` tells what FP8 costs after it. It
learns from the text alone, whatever the distillation.

Where the casts begin, before the first step or after those in high precision, two things follow from the model as it
then is: it is the teacher, and ``octavo.calibrate`` gives its inputs' first scales.

With ``by_data`` the weights are rounded by the training windows (``octavo.quantization.compensate_rounding``) after the
last step. Before the casts it is lost: every step moves the weights, which are then rounded to the nearest again, and
the errors that made each other good do so no longer (measured: docs/qat.md).
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
from octavo.nn import Linear
from octavo.quantization.calibration import calibrate, compensate_rounding
from octavo.quantization.qat.linear import QATLinear, Scales
from octavo.quantization.qat.prepare import HIGH_PRECISION, NO_SCALE, check_recipe, convert_qat, prepare_qat
from octavo.quantization.qat.tuning import TuneSettings, TuneStep, tune, window_nats
from octavo.recipes import Recipe
from octavo.state import load_scaling_state, scaling_state
from octavo.training.comparison import Gap, paired_gap

__all__ = ["BASELINE", "CALIBRATION_WINDOWS", "Phase", "QATResult", "QATSettings", "run_qat"]

Phase = Callable[..., None]  # (name, done, total, note="")
BEFORE, PLAIN_FP8, BASELINE, FP8_OF_BASELINE, QAT = "bf16", "fp8", "bf16-tuned", "fp8-of-tuned", "fp8-qat"
FP8_BY_DATA = "fp8-by-data"
CALIBRATION_WINDOWS = 128  # training windows that an input's scale is taken from
ROUNDING_TOKENS = 8192  # of training windows that weights are rounded by


@dataclass(frozen=True, slots=True, kw_only=True)
class QATSettings:
    """What is trained for, and how.

    Attributes:
        recipe: see :func:`octavo.prepare_qat`.
        scales: as there; frozen and tracked ones begin with those of ``octavo.calibrate``.
        clip_gradients: as there.
        skip: as there.
        convert_head: as there.
        by_data: whether weights are rounded by data after the last step.
        baseline: whether a BF16 model is tuned too.
        tuning: steps, batches, rates, distillation.
    """

    recipe: Recipe
    scales: str = Scales.TRACKED
    clip_gradients: bool = False
    skip: tuple[str, ...] = ()
    convert_head: bool = False
    by_data: bool = False
    baseline: bool = False
    tuning: TuneSettings

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        if self.scales not in tuple(Scales):
            raise ConfigError(f"scales must be one of {', '.join(Scales)}, not {self.scales!r}")
        tuning = self.tuning
        if self.starts_scales_at_first_batch and tuning.moving_steps == tuning.high_precision_steps:
            raise ConfigError(
                f"learned scales start at the first batch that is cast, and a freeze_share of {tuning.freeze_share} "
                "lets none come before they are frozen; lower it, or use scales='frozen'"
            )

    @property
    def starts_scales_at_first_batch(self) -> bool:
        """Whether static inputs' scales begin with what training shows them, and not with a calibration's."""
        return self.scales == Scales.LEARNED and self.recipe.has_static_input


@dataclass(frozen=True, slots=True, kw_only=True)
class QATResult:
    """What a run measured and made.

    Attributes:
        language_model: tuned and converted; only the layers of ``report`` are other than they came.
        report: of its conversion.
        settings: of the run.
        windows: mean held-out loss of each window, by what was measured.
        steps: of each tuning, in order.
    """

    language_model: LanguageModel
    report: ConversionReport
    settings: QATSettings
    windows: dict[str, tuple[float, ...]]
    steps: dict[str, tuple[TuneStep, ...]]

    @property
    def reference(self) -> str:
        """What the others are compared with."""
        return BASELINE if BASELINE in self.windows else BEFORE

    def perplexity(self, name: str) -> float:
        """The exponential of a mean held-out loss; infinite where that overflows."""
        losses = self.windows[name]
        return perplexity(math.fsum(losses) / len(losses))

    def gap(self, name: str, beside: str | None = None) -> Gap:
        """How much more it loses than another, by default the reference, window by window."""
        return paired_gap(self.windows[name], self.windows[beside or self.reference])


def run_qat(
    source: LanguageModel,
    settings: QATSettings,
    *,
    training: Tensor,
    held_out: Tensor,
    on_phase: Phase = lambda *_, **__: None,
) -> QATResult:
    """Tune copies of a model and measure them; the model itself stays as it is.

    Args:
        source: in FP32.
        settings: what to do.
        training: windows to tune on, int64 [at least ``settings.tuning.windows``, context].
        held_out: windows to measure on, int64 [count, length].
        on_phase: told of progress.

    Raises:
        ConfigError: what :func:`octavo.prepare_qat` or :func:`octavo.quantization.qat.tuning.tune` refuses.
        NonFiniteLossError: a loss was not finite.
    """
    run = _Run(source, settings, training, held_out, on_phase)
    before = run.copied(source.model)
    plain = run.quantised_plainly(before)  # what cannot be prepared shows at once
    run.measure(BEFORE, before)
    run.measure(PLAIN_FP8, plain)
    del plain
    if settings.baseline:
        run.tune_baseline()
    student, report = run.trained_for_fp8()
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


class _Run:
    """The pieces of a run, and what they measured."""

    def __init__(
        self, source: LanguageModel, settings: QATSettings, training: Tensor, held_out: Tensor, on_phase: Phase
    ) -> None:
        self.source, self.settings, self.on_phase = source.model, settings, on_phase
        device = next(self.source.parameters()).device
        self.training, self.held_out = training.to(device), held_out.to(device)
        self.windows: dict[str, tuple[float, ...]] = {}
        self.steps: dict[str, tuple[TuneStep, ...]] = {}

    @property
    def around(self) -> AbstractContextManager[object]:
        return torch.autocast(self.training.device.type, dtype=torch.bfloat16, cache_enabled=False)

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy whose linears all run in BF16."""
        made = copy.deepcopy(model)
        restore(made)
        convert(made, HIGH_PRECISION, convert_head=True)
        return made.eval()

    def measure(self, name: str, model: nn.Module) -> None:
        """Its held-out losses."""
        self.windows[name] = window_nats(
            model,
            self.held_out,
            surroundings=self.around,
            on_window=lambda done, total: self.on_phase(f"evaluate {name}", done, total),
        )

    def quantised_plainly(self, model: nn.Module, *, by_data: bool = False) -> nn.Module:
        """A copy of a BF16 model that was quantised and not trained for it."""
        made = self._prepared(model, scales=Scales.FROZEN)
        self._load_input_scales(made, model)
        if by_data:
            self._round_by_data(made)
        _converted(made)
        return made

    def tune_baseline(self) -> None:
        """Tune a copy of the source in BF16, and measure it and what is quantised of it."""
        tuned = self.copied(self.source)
        self._tune(BASELINE, tuned, replace(self.settings.tuning, distill=0.0))
        self.measure(BASELINE, tuned)
        self.measure(FP8_OF_BASELINE, self.quantised_plainly(tuned))
        if self.settings.by_data:
            self.measure(FP8_BY_DATA, self.quantised_plainly(tuned, by_data=True))

    def trained_for_fp8(self) -> tuple[nn.Module, ConversionReport]:
        """A copy of the source after quantisation-aware training, converted."""
        made = self._prepared(self.source, scales=self.settings.scales)
        teachers: list[nn.Module] = []

        def before_casts() -> None:
            teachers.append(self._as_it_is(made))
            if not self.settings.starts_scales_at_first_batch:
                self._load_input_scales(made, teachers[0])

        def teach(tokens: Tensor) -> Tensor:
            with self.around:
                return logits_of(teachers[0], tokens)

        self._tune(QAT, made, self.settings.tuning, teacher=teach, before_casts=before_casts)
        if self.settings.by_data:
            self._round_by_data(made)
        return made, _converted(made)

    def _tune(self, name: str, model: nn.Module, settings: TuneSettings, **options: Any) -> None:
        """Tune a copy in place, and keep what its steps said."""
        done: list[TuneStep] = []

        def on_step(step: TuneStep) -> None:
            done.append(step)
            self.on_phase(f"tune {name}", step.step, settings.steps, f"loss {step.loss:.3f}")

        self.on_phase(f"tune {name}", 0, settings.steps)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)  # of what the model itself draws, such as dropout's masks
            tune(model, self.training, settings, surroundings=self.around, on_step=on_step, **options)
        self.steps[name] = tuple(done)

    def _prepared(self, model: nn.Module, *, scales: str) -> nn.Module:
        """A copy in quantisation-aware training; what takes no part runs in BF16."""
        made = copy.deepcopy(model)
        restore(made)
        prepare_qat(
            made,
            self.settings.recipe,
            scales=scales,
            clip_gradients=self.settings.clip_gradients,
            skip=self.settings.skip,
            convert_head=self.settings.convert_head,
        )
        convert(made, HIGH_PRECISION, convert_head=True)
        return made.eval()

    def _as_it_is(self, prepared: nn.Module) -> nn.Module:
        """A BF16 model with the weights that a prepared one has now."""
        made = self.copied(self.source)
        weights = prepared.state_dict()
        made.load_state_dict({key: weights[key] for key in made.state_dict()})
        return made

    def _load_input_scales(self, prepared: nn.Module, in_bf16: nn.Module) -> None:
        """Calibrate the static inputs of a prepared model on the same model in BF16."""
        if self.settings.recipe.has_static_input:
            load_scaling_state(prepared, scaling_state(prepared) | self._input_scales(in_bf16))

    def _round_by_data(self, prepared: nn.Module) -> None:
        windows = self._some(-(-ROUNDING_TOKENS // self.training.shape[1]))
        with self.around:
            compensate_rounding(prepared, windows, on_batch=partial(self.on_phase, "round by data"))
        shared = read_by_others(prepared)
        if stay := [path for path in shared if isinstance(prepared.get_submodule(path), QATLinear)]:
            note = f"not {', '.join(stay)}: {shared[stay[0]]}"
            self.on_phase("round by data", len(windows), len(windows), note)

    def _input_scales(self, model: nn.Module) -> dict[str, Tensor]:
        """The scales of inputs that ``octavo.calibrate`` finds on training windows."""
        with self.around:
            found = calibrate(
                model,
                self._some(CALIBRATION_WINDOWS),
                skip=self.settings.skip,
                convert_head=self.settings.convert_head,
                on_batch=partial(self.on_phase, "calibrate"),
            )
        return {f"{path}.input.scale": scale for path, scale in found.input_scales.items()}

    def _some(self, count: int) -> list[Tensor]:
        """So many training windows, spread evenly, as batches of one; all if there are fewer."""
        return [window[None] for window in self.training[:: max(1, len(self.training) // count)][:count]]


def _converted(prepared: nn.Module) -> ConversionReport:
    """Convert what was prepared, all of it: a layer that stayed plain would be measured as if it were in FP8."""
    report = convert_qat(prepared)
    if unreached := [path for path, why in report.skipped.items() if why == NO_SCALE]:
        raise ConfigError(
            f"no training window reaches layer {unreached[0]!r}, so its input has no scale; leave it out with skip, or "
            "give more windows"
        )
    return report
