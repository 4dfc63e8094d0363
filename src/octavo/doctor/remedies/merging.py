"""Several remedies in one configuration, none of which undoes another."""

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from octavo import recipes
from octavo.doctor.findings import Remedy
from octavo.doctor.remedies.case import fineness
from octavo.errors import ConfigError

__all__ = ["applied"]

SOMETHING_LONG = "\0" * 64  # no name has it, and only a star takes it all
SET = re.compile(r"\[!?\]?[^\]]*\]")  # of characters, in a pattern
BOUNDED = {"lr", "min_lr", "warmup", "grad_accumulation", "weight_decay"}


def applied(config: Mapping[str, Any], remedies: Iterable[Remedy]) -> dict[str, Any]:
    """A configuration with the changes of all remedies.

    A phase at the end of training comes after the phases that the configuration has until then.
    Where two say different things, the finer wins: of recipes the finer one, and a layer that one keeps out of FP8
    needs no recipe; of learning rates the smallest, of warm-ups the longest, of loss scales the dynamic one; of
    anything else the first remedy's. A recipe's options that it does not take are left out.

    Args:
        config: sections of keys, as TOML has them; it is not changed.
        remedies: the most important first.

    Example:
        >>> changes = [{"overrides": {"a": "rowwise"}}, {"overrides": {"a": "bf16"}}, {"lr": 0.1}]
        >>> applied({"training": {"lr": 1.0}}, [Remedy(text="", changes=one) for one in changes])
        {'training': {'lr': 0.1, 'overrides': {'a': 'bf16'}}}
    """
    found = deepcopy(dict(config))
    training = found.setdefault("training", {})
    merged: dict[str, Any] = {}
    for remedy in remedies:
        for key, value in remedy.changes.items():
            merged[key] = value if key not in merged else _finer(key, merged[key], value)
    _put(training, deepcopy(merged))
    return found


def _finer(key: str, one: Any, other: Any) -> Any:
    """Of two values of one key, what both remedies can live with."""
    return _MEETINGS[key](one, other) if key in _MEETINGS else one


def _all_patterns(one: list[str], other: list[str]) -> list[str]:
    return [*one, *(pattern for pattern in other if pattern not in one)]


def _finer_overrides(one: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    return one | {pattern: _finer_recipe(name, one.get(pattern)) for pattern, name in other.items()}


def _first_options(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return other | one


def _word_or_smaller(one: str | float, other: str | float) -> str | float:
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else other
    return min(one, other)


def _finer_recipe(one: str, other: str | None) -> str:
    return one if other is None or fineness(one) > fineness(other) else other


_MEETINGS: dict[str, Callable[[Any, Any], Any]] = {
    "skip": _all_patterns,
    "overrides": _finer_overrides,
    "recipe_options": _first_options,
    "recipe": _finer_recipe,
    "loss_scale": _word_or_smaller,
    "lr": min,
    "min_lr": min,
    "warmup": max,
    "grad_accumulation": max,
    "weight_decay": max,
}


def _put(training: dict[str, Any], changes: dict[str, Any]) -> None:
    """Change a configuration's [training] section."""
    overrides, skip = changes.pop("overrides", {}), changes.pop("skip", [])
    options = changes.pop("recipe_options", {})
    if "recipe" in changes and fineness(changes["recipe"]) < fineness(str(training.get("recipe", ""))):
        del changes["recipe"]
    known = {} if changes.get("recipe", training.get("recipe")) != training.get("recipe") else training
    for key in BOUNDED & changes.keys() & training.keys():
        changes[key] = _finer(key, training[key], changes[key])
    if "precision_schedule" in changes:
        changes["precision_schedule"] = _with_last_phase(training, changes["precision_schedule"])
    training |= changes
    if options or "recipe" in changes:
        training["recipe_options"] = _taken(str(training.get("recipe", "")), known.get("recipe_options", {}) | options)
    if skip:
        training["skip"] = [*training.get("skip", ()), *(one for one in skip if one not in training.get("skip", ()))]
    if "recipe" in changes:  # a layer's remedy may be coarser than what all layers run now
        own = fineness(changes["recipe"])
        overrides = {pattern: name for pattern, name in overrides.items() if fineness(name) > own}
    if overrides or (skip and training.get("overrides")):
        training["overrides"] = _overrides(training, overrides)
    if "lr" in changes and training.get("min_lr", 0) > changes["lr"]:
        training["min_lr"] = changes["lr"]


def _with_last_phase(training: dict[str, Any], wanted: list[list[Any]]) -> list[list[Any]]:
    """A run's own phases up to where the remedy's last one begins, and that one.

    A phase that has begun by then in the same recipe is not begun again.
    """
    *_, (name, start) = wanted
    before = [list(phase) for phase in training.get("precision_schedule") or [["fp8", 0.0]] if phase[1] < start]
    return before if before and before[-1][0] == name else [*before, [name, start]]


def _taken(recipe: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those options that the recipe takes."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        try:
            recipes.get(recipe, **{name: value})
        except ConfigError:
            continue
        found[name] = value
    return found


def _overrides(training: dict[str, Any], new: dict[str, str]) -> dict[str, str]:
    """Overrides with new ones among them: none stands behind a coarser one, or before a finer one, of its layers.

    Those of layers that are kept out of FP8 are left out.
    """
    found: dict[str, str] = dict(training.get("overrides", {}))
    for pattern, name in new.items():
        found = _with_override(found, pattern, _finer_recipe(name, found.get(pattern)))
    skip = training.get("skip", ())
    return {pattern: name for pattern, name in found.items() if not any(fnmatchcase(pattern, one) for one in skip)}


def _with_override(before: dict[str, str], pattern: str, name: str) -> dict[str, str]:
    """``before`` with one more; the first that matches a layer counts.

    A coarser one of some of the new one's layers is made as fine. The new one goes before the first coarser one that
    has other layers too; so do all finer ones behind that place where the new one would hide any.
    """
    found = {
        other: name if _is_within(other, pattern) and fineness(own) < fineness(name) else own
        for other, own in before.items()
    }
    touching = [other for other in found if _overlap(other, pattern)]
    coarser = [other for other in touching if fineness(found[other]) < fineness(name)]
    if not coarser:
        return found | {pattern: name}
    place = list(found).index(coarser[0])
    finer = [other for other in list(found)[place:] if fineness(found[other]) > fineness(name) and other != pattern]
    would_hide = not _is_within(pattern, coarser[0]) and not set(finer).isdisjoint(touching)
    order = [*(one for one in list(found)[:place] if one != pattern), *(finer if would_hide else ()), pattern, *found]
    return {other: name if other == pattern else found[other] for other in dict.fromkeys(order)}


def _is_within(inner: str, outer: str) -> bool:
    """Whether every layer of a pattern is one of another's."""
    return fnmatchcase(inner.replace("*", SOMETHING_LONG), outer)


@lru_cache(maxsize=4096)
def _overlap(one: str, other: str) -> bool:
    """Whether some path may match both patterns; a set of characters counts as any character."""
    one, other = (SET.sub("?", pattern) for pattern in (one, other))
    if not one or not other:
        return not (one + other).strip("*")
    if one[0] == "*":
        return _overlap(one[1:], other) or _overlap(one, other[1:])
    if other[0] == "*":
        return _overlap(other, one)
    return (one[0] == other[0] or "?" in (one[0], other[0])) and _overlap(one[1:], other[1:])
