"""Two plans that ``octavo plan --json`` printed, side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import DataError
from octavo.parsing import read_object

__all__ = ["PlanDifference", "compare_plans", "read_plan"]

PAIRS, RATE = ("step_time_s", "days", "memory_gb"), "tokens_per_s_per_gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """One recipe in two plans: step times in seconds, days and memory in GB, first plan before second.

    ``times_as_fast`` is the ratio of tokens a second, since steps may have other batches.
    """

    recipe: str
    step_time_s: tuple[float, float]
    days: tuple[float, float]
    memory_gb: tuple[float, float]
    times_as_fast: float


def read_plan(path: Path) -> dict[str, Any]:
    """Read a plan that ``octavo plan --json`` printed.

    Raises:
        DataError: the file is not a plan, or is damaged.
        OSError: it cannot be opened.
    """
    advice = "give a file that octavo plan --json wrote"
    try:
        record = read_object(path)
    except DataError as error:
        raise DataError(f"{str(path)!r} is not a plan: {error}; {advice}") from error
    options = record.get("options")
    if not isinstance(options, list) or not options or not all(isinstance(option, dict) for option in options):
        raise DataError(f"{str(path)!r} is not a plan: it has no list of options; {advice}")
    if not _is_positive(record.get("gpus")) or not isinstance(record["gpus"], int):
        raise DataError(f"{str(path)!r} is not a plan: it has no whole number of gpus above 0; {advice}")
    for option in options:
        numbers = [option.get(name) for name in (*PAIRS, RATE)]
        if not isinstance(option.get("recipe"), str):
            raise DataError(f"{str(path)!r} is not a plan: an option has no recipe; {advice}")
        if option.get("reason") is None and not all(_is_positive(number) for number in numbers):
            raise DataError(f"{str(path)!r} is not a plan: {option['recipe']} has no numbers above 0; {advice}")
    names = [option["recipe"] for option in options]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{str(path)!r} is not a plan: it has {twice} twice; {advice}")
    return record


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0


def compare_plans(first: dict[str, Any], second: dict[str, Any]) -> list[PlanDifference]:
    """Return the recipes that both plans have, in the order of the first."""
    others = {option["recipe"]: option for option in second["options"] if option.get("reason") is None}
    found = []
    for option in first["options"]:
        other = others.get(option["recipe"])
        if other is None or option.get("reason") is not None:
            continue
        pairs = {name: (option[name], other[name]) for name in PAIRS}
        ratio = other[RATE] * second["gpus"] / (option[RATE] * first["gpus"])
        found.append(PlanDifference(recipe=option["recipe"], times_as_fast=ratio, **pairs))
    return found
