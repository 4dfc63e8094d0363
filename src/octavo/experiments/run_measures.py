"""Measures of one finished run of a study: held-out loss, curves, speed, memory, and gradient noise."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from octavo.checksums import unsealed
from octavo.errors import DataError
from octavo.models import Llama
from octavo.nn.scaling_state import update_scales
from octavo.parsing import read_object
from octavo.text.corpus import Split
from octavo.text.tokens import TokenData
from octavo.training.comparison import RunMeasures
from octavo.training.config import RunConfig
from octavo.training.evaluate import evaluate, token_loss
from octavo.training.events import Event, StepDone
from octavo.training.gradient_noise import GradientNoise, GradientProbe, gradient_noise
from octavo.training.held_out import BATCH_WINDOWS, batches_of, watching_forwards
from octavo.training.metrics import read_metrics
from octavo.training.precision import apply_recipe, resolve_device, surroundings
from octavo.training.result import TrainResult
from octavo.training.run_folder import TrainedRun, load_run

__all__ = ["MEASURES", "OnPhase", "Phase", "known_measures", "measures_of", "noise_at", "on_step"]

MEASURES = "measures.json"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Progress of a phase: ``done`` of ``total``."""

    name: str
    done: float
    total: float
    note: str = ""


OnPhase = Callable[[Phase], None]


def on_step(name: str, report: OnPhase) -> Callable[[Event], None]:
    """Callback of a training run that reports its steps as a phase."""

    def on_event(event: Event) -> None:
        if isinstance(event, StepDone):
            note = f"loss {event.loss:.3f}, {event.tokens_per_second:,.0f} tokens/s"
            report(Phase(name=name, done=event.step, total=event.steps, note=note))

    return on_event


def measures_of(
    result: TrainResult, config: RunConfig, data: TokenData, *, test_tokens: int | None, report: OnPhase
) -> RunMeasures:
    """Evaluate a finished run on the test windows, and collect what its folder holds."""
    return RunMeasures(
        recipe=config.training.recipe,
        steps=result.step,
        train_curve=result.train_curve,
        validation_curve=result.validation_curve,
        window_nats=_window_nats(load_run(result.run_dir), data, test_tokens, report),
        tokens_per_second=_tokens_per_second(result.run_dir, config),
        peak_memory_bytes=result.peak_memory_bytes,
        threads=_threads(result.run_dir),
    )


def known_measures(path: Path, read: Callable[[dict[str, Any]], T | None]) -> T | None:
    """Read a measures.json with ``read``; None if there is none.

    Raises:
        DataError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        return read(unsealed(read_object(path)))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{str(path)!r} is damaged ({error}); delete it and run the study again") from error


def noise_at(
    weights_dir: Path, configs: Mapping[str, RunConfig], data: TokenData, *, batches: int, report: OnPhase
) -> dict[str, GradientNoise]:
    """Noise under every configuration at one run's final weights, on the micro-batches after its last step."""
    weights = load_run(weights_dir).model
    probes = {recipe: _probe(weights, config) for recipe, config in configs.items()}
    first = next(iter(configs.values())).training
    start = first.steps * first.grad_accumulation
    drawn = [
        torch.stack(data.batch(step, batch_size=first.batch_size, context=first.context, seed=first.seed))
        for step in range(start, start + batches)
    ]

    def on_batch(done: int) -> None:
        report(Phase(name="gradient noise", done=done, total=batches))

    return gradient_noise(probes, drawn, on_batch=on_batch)


def _window_nats(run: TrainedRun, data: TokenData, test_tokens: int | None, report: OnPhase) -> tuple[float, ...]:
    training = run.config.training
    total = batches_of(data, training.context, max_tokens=test_tokens)

    def on_forward(done: int) -> None:
        report(Phase(name=f"evaluate {training.recipe}", done=done, total=total))

    with watching_forwards(run.model, on_forward):
        evaluation = evaluate(
            run.model,
            data,
            context=training.context,
            split=Split.TEST,
            max_tokens=test_tokens,
            batch_size=BATCH_WINDOWS,
            surroundings=run.surroundings,
        )
    return evaluation.window_nats


def _tokens_per_second(run_dir: Path, config: RunConfig) -> float:
    """Tokens of an update over the median duration of all updates of the run, including those before a resume."""
    seconds = [float(line["seconds"]) for line in read_metrics(run_dir) if line["kind"] == "step"]
    typical: float = statistics.median(seconds)
    return config.training.tokens_per_step / max(typical, 1e-4)


def _threads(run_dir: Path) -> tuple[int, ...]:
    """Distinct numbers of CPU threads in the run's steps."""
    return tuple(sorted({int(line["threads"]) for line in read_metrics(run_dir) if "threads" in line}))


def _probe(weights: Llama, config: RunConfig) -> GradientProbe:
    device = resolve_device(config.training.device)
    model = Llama(weights.config).to(device)
    model.load_state_dict(weights.state_dict())
    apply_recipe(model, config.training, step=config.training.steps)
    context = surroundings(config.training, device, model)

    def loss(batch: Tensor) -> Tensor:
        update_scales(model)  # a delayed recipe computes its scales from the previous batch
        inputs, targets = batch.to(device)
        with context:
            return token_loss(model(inputs), targets)

    return GradientProbe(model=model, loss=loss)
