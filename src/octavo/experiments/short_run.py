"""One short training run in a separate folder, from initial weights or those of a longer run."""

import copy
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from octavo.doctor import Series, series_of
from octavo.errors import NonFiniteLossError
from octavo.nn.scaling_state import accept_new_histories
from octavo.text.tokens import TokenData
from octavo.training.config import RunConfig
from octavo.training.evaluate import evaluate
from octavo.training.events import Event
from octavo.training.loop import Trainer
from octavo.training.metrics import read_metrics
from octavo.training.setup import build_model
from octavo.training.threads import using_threads

__all__ = ["ShortRun", "Start", "short_run", "start_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Initial state of a short run: weights and optimizer after ``step`` updates of a longer run."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """Losses and statistics of a short run.

    Attributes:
        losses: (step, nats) of every update.
        validation_nats: loss after the last update; None if the run failed.
        series: statistics for the doctor's rules.
        failure: message of the error that ended the run; None if it finished.
    """

    losses: tuple[tuple[int, float], ...]
    validation_nats: float | None
    series: Series
    failure: str | None = None


def start_of(trainer: Trainer) -> Start:
    """Copy the state of a trainer."""
    return Start(
        step=trainer.step,
        weights={name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()},
        optimizer=copy.deepcopy(trainer.optimizer.state_dict()),
    )


def short_run(
    config: RunConfig,
    data: TokenData,
    *,
    steps: int,
    start: Start | None = None,
    around: Callable[[Trainer], AbstractContextManager[object]] = lambda _: nullcontext(),
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> tuple[ShortRun, Trainer]:
    """Train for a few updates; a failure is part of the result.

    Args:
        config: configuration of the training; its schedule counts from ``start``.
        data: the token files.
        steps: number of updates after those of ``start``.
        start: initial state; None for initial weights.
        around: a context for the updates, such as a fault.
        prepare: called with the converted model before the trainer is built, which may change its modules.
    """
    events: list[Event] = []
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder, using_threads(config.training.threads):
        model, converted = build_model(config, data.vocab_size)
        prepare(model)
        trainer = Trainer(config, Path(folder), model, data=data, on_event=events.append, converted=converted)
        if start is not None:
            trainer.step = start.step
            trainer.model.load_state_dict(start.weights)
            trainer.optimizer.load_state_dict(copy.deepcopy(start.optimizer))
            accept_new_histories(trainer.model)
        log, failure, nats = trainer.open_log(), None, None
        trainer.model.train()
        try:
            with around(trainer):
                for _ in range(steps):
                    trainer.train_step(log)
                nats = evaluate(
                    trainer.model,
                    data,
                    context=config.training.context,
                    max_tokens=config.training.eval_tokens or None,
                    surroundings=trainer.surroundings,
                ).nats
        except NonFiniteLossError as error:
            failure = str(error)
        finally:
            log.close()
        lines = read_metrics(trainer.run_dir)
    losses = tuple((line["step"], line["loss"]) for line in lines if line["kind"] == "step")
    return ShortRun(losses=losses, validation_nats=nats, series=series_of(lines), failure=failure), trainer
