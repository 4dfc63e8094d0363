"""Search for the layers that account for a run's loss gap to BF16, by running some in BF16 for a few steps.

The layers are tested in groups: all of them, halves, halves of the halves above the noise floor, down to single layers.
A group's share is the decrease of the loss with that group alone in BF16, over the decrease with all layers in BF16.
The noise floor is three standard errors, pooled over all measurements, of the difference between two runs under several
orders of the batches. Shares need not add up to 1: two layers may each hide the other's cost.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from octavo.experiments.origin import Origin
from octavo.experiments.paired import Effect, PairedRuns, pooled_error
from octavo.training.loop import Trainer

__all__ = ["Bisection", "Part", "bisect"]

FLOOR_ERRORS = 3.0  # a gap and two halves give three degrees of freedom, whose 95 % quantile is 3.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Layers that account for a part of the gap.

    Attributes:
        layers: one, or several whose parts are each below the noise floor.
        effect: decrease of the loss with them in BF16.
        share: of the gap.
    """

    layers: tuple[str, ...]
    effect: Effect
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Result of a bisection.

    Attributes:
        gap: decrease of the loss with all layers in BF16.
        floor: noise floor in nats.
        parts: largest share first; empty if the gap itself is below the floor.
        layers: number of layers tested.
        first_step: updates behind the initial weights of every run.
        steps: updates of each run.
        runs: number of runs.
    """

    gap: Effect
    floor: float
    parts: tuple[Part, ...]
    layers: int
    first_step: int
    steps: int
    runs: int

    @property
    def is_measurable(self) -> bool:
        """True if the gap exceeds the noise floor."""
        return self.gap.nats > self.floor


def bisect(
    origin: Origin,
    *,
    steps: int = 40,
    orders: int = 2,
    around: Callable[[Trainer], AbstractContextManager[object]] = lambda _: nullcontext(),
    on_run: Callable[[int], None] = lambda _: None,
) -> Bisection:
    """Find the layers that cost a run its accuracy.

    Args:
        origin: see :func:`octavo.experiments.origin_of`; from a late checkpoint the gap is that of the run.
        steps: updates of each run; the losses of the second half count.
        orders: number of orders of the batches to measure under, 2 or more.
        around: a context of each run's updates, such as a fault.
        on_run: called with the number of runs made so far.

    Raises:
        ConfigError: a number is out of range, or the recipe casts nothing to FP8.
    """
    runs = PairedRuns(origin, steps=steps, orders=orders, around=around, on_run=on_run)
    gap = runs.effect((), runs.layers)
    measured = {runs.layers: gap} | {half: runs.effect((), half) for half in halves(runs.layers)}
    leaves: list[tuple[str, ...]] = []
    waiting = [runs.layers]
    while waiting and gap.nats > _floor(measured):
        group = waiting.pop()
        measured |= {half: runs.effect((), half) for half in halves(group) if half not in measured}
        worse = [half for half in halves(group) if measured[half].nats > _floor(measured)]
        waiting += worse
        if not worse:
            leaves.append(group)
    parts = [Part(layers=one, effect=measured[one], share=measured[one].nats / gap.nats) for one in leaves]
    return Bisection(
        gap=gap,
        floor=_floor(measured),
        parts=tuple(sorted(parts, key=lambda part: -part.share)),
        layers=len(runs.layers),
        first_step=origin.first_step,
        steps=steps,
        runs=runs.made,
    )


def halves(group: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Halves of a group, the smaller first; none of a single layer."""
    middle = len(group) // 2
    return (group[:middle], group[middle:]) if middle else ()


def _floor(measured: dict[tuple[str, ...], Effect]) -> float:
    return FLOOR_ERRORS * pooled_error(list(measured.values()))
