"""Phases of a run in different recipes: ``precision_schedule = [["bf16", 0.0], ["fp8", 0.8]]``.

A phase is a recipe and the fraction of the run at which it begins. Step s of S belongs to the last phase whose fraction
is at most (s − 1) / S. "fp8" is the run's own recipe with its options; "bf16" is the precision around the FP8 layers,
FP32 if ``precision`` says so. A phase without a step is skipped.

Weights, optimizer, learning rate and the order of the text continue across phases. A delayed layer keeps its amax
history while its recipe stays; a layer that becomes delayed again starts with an empty history and dynamic scales.
"""

from collections.abc import Sequence

from octavo.errors import ConfigError
from octavo.parsing import did_you_mean
from octavo.training.recipe_choice import BF16, PLAIN_RECIPES, trainable_recipes

__all__ = ["FP8", "Phase", "check_schedule", "parse_schedule", "recipe_name_at"]

FP8 = "fp8"
Phase = tuple[str, float]


def check_schedule(schedule: Sequence[Phase], recipe: str) -> None:
    """Check the phases of a run.

    Args:
        schedule: phases of the run; empty for none.
        recipe: the run's own recipe.

    Raises:
        ConfigError: a recipe that runs cannot train with, fractions that do not increase from 0 to below 1, or a run
            without an FP8 recipe.
    """
    if not schedule:
        return
    if recipe in PLAIN_RECIPES:
        raise ConfigError(
            f"training.precision_schedule needs an FP8 recipe as training.recipe, not {recipe!r}; name the one that "
            f"{FP8!r} stands for, or leave the schedule out"
        )
    allowed = [FP8, *(name for name in trainable_recipes() if name != "fp32")]
    for name, _ in schedule:
        if name not in allowed:
            raise ConfigError(
                f"a phase of training.precision_schedule must be one of {', '.join(allowed)}, not {name!r}"
                f"{did_you_mean(name, allowed)}"
            )
    starts = [start for _, start in schedule]
    if starts[0] != 0 or starts != sorted(set(starts)) or not starts[-1] < 1:
        raise ConfigError(
            "the fractions of training.precision_schedule must begin with 0.0 and increase, each below 1, not "
            f"{', '.join(map(str, starts))}"
        )


def recipe_name_at(schedule: Sequence[Phase], step: int, *, steps: int, own: str) -> str:
    """Return the name of the recipe of a step.

    Args:
        schedule: valid phases (:func:`check_schedule`); empty for none.
        step: 1 for the first.
        steps: steps of the whole run.
        own: the run's own recipe.

    Example:
        >>> phases = (("bf16", 0.0), ("fp8", 0.5))
        >>> [recipe_name_at(phases, step, steps=5, own="rowwise") for step in (1, 2, 3, 4, 5)]
        ['bf16', 'bf16', 'bf16', 'rowwise', 'rowwise']
    """
    done = (max(1, step) - 1) / steps
    name = next((name for name, start in reversed(schedule) if start <= done), FP8)
    return own if name == FP8 else name


def parse_schedule(text: str) -> list[list[str | float]]:
    """Parse the phases of a command line.

    Raises:
        ConfigError: a part that is not a name and a fraction.

    Example:
        >>> parse_schedule("bf16:0.0,fp8:0.8")
        [['bf16', 0.0], ['fp8', 0.8]]
    """
    phases: list[list[str | float]] = []
    for part in text.split(","):
        name, _, start = part.partition(":")
        try:
            phases.append([name.strip(), float(start)])
        except ValueError as error:
            raise ConfigError(
                f"a schedule must list recipes with the fractions at which they begin, such as '{BF16}:0.0,{FP8}:0.8', "
                f"but {part!r} is not a recipe with a fraction"
            ) from error
    return phases
