"""Short training runs with equal initial weights and batches that differ only in the precision of their layers.

The loss of a run is the mean training loss of the second half of its steps. Two runs read the same text at every step,
so the effect of the batches cancels in the difference: on a model of width 64, 40 steps distinguished two precisions to
0.0002 nats, against 0.0012 nats for the loss on held-out text after the last step, which depends on that single step.
The remaining noise is measured as the difference under other orders of the batches.
"""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import nn

from octavo.errors import ConfigError
from octavo.experiments.origin import Origin
from octavo.experiments.short_run import short_run
from octavo.nn import Linear
from octavo.training.loop import Trainer
from octavo.training.recipe_choice import BF16
from octavo.training.setup import build_model

__all__ = ["Effect", "PairedRuns", "check_numbers", "pooled_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A difference of losses.

    Attributes:
        nats: its mean over the orders.
        error: standard error of the mean.
        orders: the difference under each order of the batches.
    """

    nats: float
    error: float
    orders: tuple[float, ...]


class PairedRuns:
    """Runs of one origin, each computed once.

    Args:
        origin: start of the runs; its FP8 recipe runs at every step, regardless of its precision schedule.
        steps: updates of each run, 2 or more.
        orders: number of orders of the batches, 2 or more; without a checkpoint, of initial weights too.
        around: a context of each run's updates, such as a fault.
        on_run: called with the number of runs made so far.

    Raises:
        ConfigError: a number is out of range, or the recipe casts nothing to FP8.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        steps: int,
        orders: int,
        around: Callable[[Trainer], AbstractContextManager[object]] = lambda _: nullcontext(),
        on_run: Callable[[int], None] = lambda _: None,
    ) -> None:
        check_numbers(steps=steps, orders=orders)
        origin = replace(origin, config=origin.config.with_training(precision_schedule=(), autopilot=False))
        self.origin, self.steps, self.orders, self.around, self.on_run = origin, steps, orders, around, on_run
        self.layers = fp8_layers(build_model(origin.config, origin.data.vocab_size)[0])
        if not self.layers:
            raise ConfigError(
                f"the recipe {origin.config.training.recipe!r} casts no layer to FP8; name a run or a configuration "
                "of an FP8 recipe"
            )
        self.made = 0
        self._losses: dict[frozenset[str], tuple[float, ...]] = {}

    def losses(self, high: Collection[str]) -> tuple[float, ...]:
        """Loss under each order with the layers ``high`` in BF16; a failed run counts as a uniform prediction."""
        key = frozenset(high)
        if key not in self._losses:
            self._losses[key] = tuple(self._loss(key, order) for order in range(self.orders))
        return self._losses[key]

    def effect(self, low: Collection[str], high: Collection[str]) -> Effect:
        """Loss saved by the layers ``high`` in BF16 over only those of ``low``."""
        pairs = zip(self.losses(low), self.losses(high), strict=True)
        differences = tuple(one - other for one, other in pairs)
        error = statistics.stdev(differences) / math.sqrt(self.orders)
        return Effect(nats=statistics.fmean(differences), error=error, orders=differences)

    def _loss(self, high: frozenset[str], order: int) -> float:
        training = self.origin.config.training
        bf16 = {path: BF16 for path in self.layers if path in high}
        config = self.origin.config.with_training(
            seed=training.seed + order,
            overrides=bf16 | {path: recipe for path, recipe in training.overrides.items() if path not in bf16},
            statistics_interval=0,
            eval_tokens=training.context,
        )
        result, _ = short_run(config, self.origin.data, steps=self.steps, start=self.origin.start, around=self.around)
        self.made += 1
        self.on_run(self.made)
        if result.failure is not None:
            return math.log(self.origin.data.vocab_size)
        return statistics.fmean(loss for _, loss in result.losses[self.steps // 2 :])


def check_numbers(*, steps: int, orders: int) -> None:
    """Check the numbers of updates and orders of paired runs.

    Raises:
        ConfigError: a number is below 2.
    """
    for name, value in (("steps", steps), ("orders", orders)):
        if value < 2:
            raise ConfigError(f"{name} must be a whole number of at least 2, not {value!r}")


def fp8_layers(model: nn.Module) -> tuple[str, ...]:
    """Paths of the layers whose recipe casts."""
    return tuple(
        path
        for path, module in model.named_modules()
        if isinstance(module, Linear) and not module.recipe.is_high_precision
    )


def pooled_error(effects: Sequence[Effect]) -> float:
    """Common standard error of all effects: a single effect has too few orders to estimate its own."""
    return math.sqrt(statistics.fmean(effect.error**2 for effect in effects))
