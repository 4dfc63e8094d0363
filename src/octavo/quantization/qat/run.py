"""``run_qat``: what quantisation-aware training buys a language model, and the model it leaves.

| measured        | what it is                                                             | with a baseline only |
|-----------------|------------------------------------------------------------------------|----------------------|
| bf16            | the model as it came                                                   |                      |
| fp8             | the same, quantised as it is: its scales from the training windows     |                      |
| bf16-tuned      | fine-tuned in BF16 on the same batches in the same order               | yes                  |
| fp8-of-tuned    | that one, quantised as it is                                           | yes                  |
| fp8-qat         | fine-tuned in quantisation-aware training, and converted               |                      |

All of them run in the same surroundings: BF16 autocast over FP32 master weights, other linears in octavo's "bf16". The
losses are taken on the same held-out windows, so their differences are paired (``octavo.training.comparison``).

A plain fine-tune moves the perplexity further than FP8 does, so only ``bf16-tuned`` tells what FP8 costs after it.
"""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from octavo.convert import ConversionReport, convert, restore
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel, logits_of
from octavo.quantization.qat.linear import DECAY, Scales
from octavo.quantization.qat.prepare import HIGH_PRECISION, check_recipe, convert_qat, freeze_scales, prepare_qat
from octavo.quantization.qat.tuning import TuneSettings, TuneStep, tune, window_nats
from octavo.recipes import Recipe
from octavo.training.comparison import Gap, paired_gap

__all__ = ["BASELINE", "CALIBRATION_WINDOWS", "Phase", "QATResult", "QATSettings", "run_qat"]

Phase = Callable[..., None]  # (name, done, total, note="")
BEFORE, PLAIN_FP8, BASELINE, FP8_OF_BASELINE, QAT = "bf16", "fp8", "bf16-tuned", "fp8-of-tuned", "fp8-qat"
CALIBRATION_WINDOWS = 128  # training windows that a scale is taken from where nothing is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class QATSettings:
    """What is trained for, and how.

    Attributes:
        recipe: see :func:`octavo.prepare_qat`.
        scales: as there; a frozen one comes from a pass over training windows.
        clip_gradients: as there.
        skip: as there.
        convert_head: as there.
        baseline: whether a BF16 model is tuned too.
        tuning: steps, batches, rates, distillation.
    """

    recipe: Recipe
    scales: str = Scales.TRACKED
    clip_gradients: bool = False
    skip: tuple[str, ...] = ()
    convert_head: bool = False
    baseline: bool = False
    tuning: TuneSettings

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        if self.scales not in tuple(Scales):
            raise ConfigError(f"scales must be one of {', '.join(Scales)}, not {self.scales!r}")


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
        """The exponential of a mean held-out loss."""
        losses = self.windows[name]
        return math.exp(min(math.fsum(losses) / len(losses), 700))

    def gap(self, name: str) -> Gap:
        """How much more it loses than the reference, window by window."""
        return paired_gap(self.windows[name], self.windows[self.reference])


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
    plain, before = run.quantised_plainly(source.model), run.copied()  # what cannot be prepared shows at once
    run.measure(BEFORE, before)
    run.measure(PLAIN_FP8, plain)
    del plain
    if settings.baseline:
        tuned = run.copied()
        run.tune(BASELINE, tuned, before)
        run.measure(BASELINE, tuned)
        run.measure(FP8_OF_BASELINE, run.quantised_plainly(tuned))
        del tuned
    student, report = run.trained_for_fp8(before)
    run.measure(QAT, student)
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

    def copied(self) -> nn.Module:
        """A copy of the source whose linears all run in BF16."""
        made = copy.deepcopy(self.source)
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

    def quantised_plainly(self, model: nn.Module) -> nn.Module:
        """A copy that was quantised and not trained for it."""
        made = self._prepared(model, scales=Scales.TRACKED, decay=1.0)
        self._calibrate(made)
        convert_qat(made)
        return made

    def trained_for_fp8(self, teacher: nn.Module) -> tuple[nn.Module, ConversionReport]:
        """A copy of the source after quantisation-aware training, converted."""
        if self.settings.scales == Scales.FROZEN:
            made = self._prepared(self.source, scales=Scales.TRACKED, decay=1.0)
            self._calibrate(made)
            freeze_scales(made)
        else:
            made = self._prepared(self.source, scales=self.settings.scales)
        self.tune(QAT, made, teacher)
        return made, convert_qat(made)

    def tune(self, name: str, model: nn.Module, teacher: nn.Module) -> None:
        """Tune a copy in place, and keep what its steps said."""
        done: list[TuneStep] = []
        total = self.settings.tuning.steps

        def on_step(step: TuneStep) -> None:
            done.append(step)
            self.on_phase(f"tune {name}", step.step, total, f"loss {step.loss:.3f}")

        def teach(tokens: Tensor) -> Tensor:
            with self.around:
                return logits_of(teacher, tokens)

        self.on_phase(f"tune {name}", 0, total)
        tune(model, self.training, self.settings.tuning, surroundings=self.around, teacher=teach, on_step=on_step)
        self.steps[name] = tuple(done)

    def _prepared(self, model: nn.Module, *, scales: str, decay: float = DECAY) -> nn.Module:
        """A copy in quantisation-aware training; what takes no part runs in BF16."""
        made = copy.deepcopy(model)
        restore(made)
        prepare_qat(
            made,
            self.settings.recipe,
            scales=scales,
            decay=decay,
            clip_gradients=self.settings.clip_gradients,
            skip=self.settings.skip,
            convert_head=self.settings.convert_head,
        )
        convert(made, HIGH_PRECISION, convert_head=True)
        return made.eval()

    def _calibrate(self, model: nn.Module) -> None:
        """Let tracked scales see training windows."""
        if not self.settings.recipe.has_static_input:
            return
        model.train()
        window_nats(
            model,
            self.training[:: max(1, len(self.training) // CALIBRATION_WINDOWS)][:CALIBRATION_WINDOWS],
            surroundings=self.around,
            on_window=lambda done, total: self.on_phase("calibrate", done, total),
        )
        model.eval()
