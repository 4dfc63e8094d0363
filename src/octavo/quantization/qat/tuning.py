"""Fine-tuning of a language model on windows of text for a few hundred steps.

An update computes the next-token loss of a batch of windows, clips the gradient norm and applies AdamW with linear
warm-up and cosine decay. BF16 models and models in quantization-aware training are tuned on the same batches in the
same order, so that they can be compared. Tracked and learned scales are frozen for the last share of the steps: the
weights adapt to the scales of the converted model.

The first steps may run in high precision, without casts in layers in quantization-aware training. A fine-tune that is
needed anyway then costs no more than usual, and casts begin once the learning rate is small.

A nonfinite loss or gradient norm stops the run before the weights are updated, and the step is replayed to name the
first nonfinite tensor (``octavo.training.nonfinite``).
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.autocast import autocast
from octavo.errors import ConfigError, NonFiniteLossError
from octavo.language_model import LogitsModule, logits_of
from octavo.models import Llama
from octavo.quantization.qat.distillation import check_distillation, distillation_loss
from octavo.quantization.qat.prepare import freeze_scales, parameter_groups
from octavo.training.evaluate import token_loss
from octavo.training.nonfinite import failure_sentence, first_nonfinite
from octavo.training.schedules import learning_rate

__all__ = ["Teacher", "TuneSettings", "TuneStep", "tune", "window_nats"]

FLOOR = 0.1  # learning rate of the last update, relative to the peak
Teacher = Callable[[Tensor], Tensor]  # token ids [B, T] → logits [B, T, V]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """Settings of a fine-tune.

    Attributes:
        steps: number of updates.
        batch_size: windows per update.
        context: tokens per window; the first is not predicted.
        learning_rate: peak rate of the weights.
        scale_learning_rate: peak rate of learned scales, in powers of two per step.
        warmup: updates until the peak.
        weight_decay: of matrices.
        clip_norm: gradients are scaled down to this norm.
        high_precision_share: share of the steps, at the beginning, without casts; at least one step must cast.
        freeze_share: share of the other steps, at the end, with frozen scales.
        distill: weight of the divergence from the teacher, from 0 to 1, in steps that cast.
        temperature: of that divergence.
        seed: of the selection and order of the windows.

    Raises:
        ConfigError: a value is out of range.
    """

    steps: int = 200
    batch_size: int = 2
    context: int = 256
    learning_rate: float = 2e-5
    scale_learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    high_precision_share: float = 0.0
    freeze_share: float = 0.2
    distill: float = 0.0
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("context", 2), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("learning_rate", "scale_learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive and finite, not {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay must be 0 or more and finite, not {self.weight_decay}")
        for name in ("high_precision_share", "freeze_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        if self.high_precision_steps == self.steps:
            raise ConfigError(
                f"a high_precision_share of {self.high_precision_share} leaves none of {self.steps} steps that cast, "
                "so nothing is trained for FP8; lower it, or take more steps"
            )
        check_distillation(self.distill, self.temperature)

    @property
    def windows(self) -> int:
        """Number of windows of a run; each is used once."""
        return self.steps * self.batch_size

    @property
    def high_precision_steps(self) -> int:
        """Number of steps without casts, at the beginning."""
        return round(self.high_precision_share * self.steps)

    @property
    def moving_steps(self) -> int:
        """Number of steps before the scales are frozen."""
        return self.steps - round(self.freeze_share * (self.steps - self.high_precision_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneStep:
    """Finished update: number, loss before the update, learning rate, gradient norm before clipping, time."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float


def tune(
    model: nn.Module,
    windows: Tensor,
    settings: TuneSettings,
    *,
    surroundings: AbstractContextManager[object] | None = None,
    teacher: Teacher | None = None,
    before_casts: Callable[[], None] = lambda: None,
    on_step: Callable[[TuneStep], None] = lambda _: None,
) -> None:
    """Fine-tune a model in place; it is in evaluation mode afterwards.

    Args:
        model: octavo's or transformers' causal language model, plain, converted or prepared.
        windows: int64 [at least ``settings.windows``, ``settings.context``].
        settings: of the fine-tune.
        surroundings: reusable context manager for the forward pass, such as autocast.
        teacher: source of the logits for ``settings.distill``.
        before_casts: called once, before the first step that casts; it may change weights and scales in place.
        on_step: called after each update.

    Raises:
        ConfigError: too few windows, or distillation without a teacher.
        NonFiniteLossError: the loss or a gradient was NaN or infinite; the weights are those of the previous step.
    """
    if settings.distill and teacher is None:
        raise ConfigError("distillation needs a teacher; give one, or set distill to 0")
    context = nullcontext() if surroundings is None else surroundings
    tuned = (model if isinstance(model, Llama) else LogitsModule(model)).train()
    groups = parameter_groups(
        model,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        scale_learning_rate=settings.scale_learning_rate,
    )
    optimizer = torch.optim.AdamW(groups)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step, batch in enumerate(_batches(windows, settings), start=1):
        started = time.perf_counter()
        if step == settings.high_precision_steps + 1:
            before_casts()
        if step == settings.moving_steps + 1:
            freeze_scales(model)
        share = learning_rate(step, peak=1.0, floor=FLOOR, warmup=settings.warmup, steps=settings.steps)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        casts = step > settings.high_precision_steps
        step_teacher = teacher if casts and settings.distill else None
        with nullcontext() if casts else autocast(enabled=False):
            loss, norm = _gradients(tuned, batch, settings, context, step_teacher)
            if not math.isfinite(loss + norm):
                nonfinite = first_nonfinite(tuned, [(batch[:, :-1], batch[:, 1:])], surroundings=context)
                why = failure_sentence(loss, norm, nonfinite)
                raise NonFiniteLossError(f"step {step}: {why}; try a lower learning rate, or look at the data")
        optimizer.step()
        seconds = time.perf_counter() - started
        on_step(TuneStep(step=step, loss=loss, learning_rate=peaks[0] * share, grad_norm=norm, seconds=seconds))
    tuned.eval()


@torch.no_grad()
def window_nats(
    model: nn.Module,
    windows: Tensor,
    *,
    surroundings: AbstractContextManager[object] | None = None,
    on_window: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[float, ...]:
    """Mean loss of each window, one at a time, in the model's current mode.

    Args:
        model: as in :func:`tune`.
        windows: int64 [count, length].
        surroundings: as in :func:`tune`.
        on_window: called with (done, total).
    """
    losses = []
    device = next(model.parameters()).device
    for done, window in enumerate(windows.to(device), start=1):
        with nullcontext() if surroundings is None else surroundings:
            logits = logits_of(model, window[None, :-1])
        losses.append(token_loss(logits, window[None, 1:], reduction="none").double().mean().item())
        on_window(done, len(windows))
    return tuple(losses)


def _gradients(
    model: nn.Module,
    batch: Tensor,
    settings: TuneSettings,
    surroundings: AbstractContextManager[object],
    teacher: Teacher | None,
) -> tuple[float, float]:
    """Loss and gradient norm of a batch; the clipped gradients are left in the parameters."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    model.zero_grad(set_to_none=True)
    with surroundings:
        logits = model(inputs)
    if teacher is not None:
        with torch.no_grad():
            target_logits = teacher(inputs)
        loss = distillation_loss(
            logits, target_logits, targets, weight=settings.distill, temperature=settings.temperature
        )
    else:
        loss = token_loss(logits, targets)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
    return loss.item(), norm.item()


def _batches(windows: Tensor, settings: TuneSettings) -> tuple[Tensor, ...]:
    if windows.ndim != 2 or len(windows) < settings.windows or windows.shape[1] != settings.context:
        raise ConfigError(
            f"{settings.steps} steps need {settings.windows} windows of {settings.context} tokens, "
            f"not {tuple(windows.shape)}; give that many"
        )
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(settings.seed))
    batches: tuple[Tensor, ...] = windows[order[: settings.windows]].split(settings.batch_size)
    return batches
