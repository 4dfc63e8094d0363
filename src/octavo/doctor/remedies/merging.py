"""Merging of several remedies into one configuration, so that none reverts another."""

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from octavo import recipes
from octavo.doctor.findings import Remedy
from octavo.doctor.remedies.context import fineness
from octavo.errors import ConfigError

__all__ = ["applied"]

WILDCARD_TEXT = "\0" * 64  # appears in no name; only a star matches all of it
CHARACTER_SET = re.compile(r"\[!?\]?[^\]]*\]")
BOUNDED = {"lr", "min_lr", "warmup", "grad_accumulation", "weight_decay"}


def applied(config: Mapping[str, Any], remedies: Iterable[Remedy]) -> dict[str, Any]:
    """Apply the changes of all remedies to a copy of a configuration.

    A final phase in BF16 is appended to the configuration's own phases before it. Conflicts are resolved towards higher
    precision: the finer recipe, the smaller learning rate, the longer warm-up, the dynamic loss scale, and no override
    for a layer that another remedy keeps out of FP8. Other conflicts are resolved in favour of the first remedy.
    Options that a recipe does not support are dropped.

    Args:
        config: sections of keys, as in TOML; it is not changed.
        remedies: the most important first.

    Example:
        >>> changes = [{"overrides": {"a": "rowwise"}}, {"overrides": {"a": "bf16"}}, {"lr": 0.1}]
        >>> applied({"training": {"lr": 1.0}}, [Remedy(text="", changes=one) for one in changes])
        {'training': {'lr': 0.1, 'overrides': {'a': 'bf16'}}}
    """
    result = deepcopy(dict(config))
    training = result.setdefault("training", {})
    merged: dict[str, Any] = {}
    for remedy in remedies:
        for key, value in remedy.changes.items():
            merged[key] = _resolve_conflict(key, merged[key], value) if key in merged else value
    _apply_changes(training, deepcopy(merged))
    return result


def _resolve_conflict(key: str, one: Any, other: Any) -> Any:
    """Resolve a conflict between two values of one key."""
    return _RESOLUTIONS[key](one, other) if key in _RESOLUTIONS else one


def _all_patterns(one: list[str], other: list[str]) -> list[str]:
    return [*one, *(pattern for pattern in other if pattern not in one)]


def _finer_overrides(one: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    return one | {pattern: _finer_recipe(name, one.get(pattern)) for pattern, name in other.items()}


def _dynamic_or_smaller(one: str | float, other: str | float) -> str | float:
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else other
    return min(one, other)


def _finer_recipe(one: str, other: str | None) -> str:
    return one if other is None or fineness(one) > fineness(other) else other


_RESOLUTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "skip": _all_patterns,
    "overrides": _finer_overrides,
    "recipe_options": lambda one, other: other | one,
    "recipe": _finer_recipe,
    "loss_scale": _dynamic_or_smaller,
    "lr": min,
    "min_lr": min,
    "warmup": max,
    "grad_accumulation": max,
    "weight_decay": max,
}


def _apply_changes(training: dict[str, Any], changes: dict[str, Any]) -> None:
    """Apply changes to a configuration's [training] section."""
    overrides, skip = changes.pop("overrides", {}), changes.pop("skip", [])
    options = changes.pop("recipe_options", {})
    if "recipe" in changes and fineness(changes["recipe"]) < fineness(str(training.get("recipe", ""))):
        del changes["recipe"]
    previous = {} if changes.get("recipe", training.get("recipe")) != training.get("recipe") else training
    for key in BOUNDED & changes.keys() & training.keys():
        changes[key] = _resolve_conflict(key, training[key], changes[key])
    if "precision_schedule" in changes:
        changes["precision_schedule"] = _with_last_phase(training, changes["precision_schedule"])
    training |= changes
    if options or "recipe" in changes:
        training["recipe_options"] = _supported_options(
            str(training.get("recipe", "")), previous.get("recipe_options", {}) | options
        )
    if skip:
        training["skip"] = _all_patterns(training.get("skip", []), skip)
    if "recipe" in changes:  # a layer's remedy may be coarser than the new recipe of all layers
        rank = fineness(changes["recipe"])
        overrides = {pattern: name for pattern, name in overrides.items() if fineness(name) > rank}
    if overrides or (skip and training.get("overrides")):
        training["overrides"] = _merge_overrides(training, overrides)
    if "lr" in changes and training.get("min_lr", 0) > changes["lr"]:
        training["min_lr"] = changes["lr"]


def _with_last_phase(training: dict[str, Any], schedule: list[list[Any]]) -> list[list[Any]]:
    """The run's own phases before the start of the remedy's final phase, followed by that phase.

    If the last of them already has the same precision, it simply continues.
    """
    *_, (name, start) = schedule
    before = [list(phase) for phase in training.get("precision_schedule") or [["fp8", 0.0]] if phase[1] < start]
    return before if before and before[-1][0] == name else [*before, [name, start]]


def _supported_options(recipe: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options that the recipe supports."""
    supported: dict[str, Any] = {}
    for name, value in options.items():
        try:
            recipes.get(recipe, **{name: value})
        except ConfigError:
            continue
        supported[name] = value
    return supported


def _merge_overrides(training: dict[str, Any], new: dict[str, str]) -> dict[str, str]:
    """Insert new overrides so that for each layer a finer override precedes a coarser one.

    Overrides of layers that are kept out of FP8 are dropped.
    """
    overrides: dict[str, str] = dict(training.get("overrides", {}))
    for pattern, name in new.items():
        overrides = _insert_override(overrides, pattern, _finer_recipe(name, overrides.get(pattern)))
    skip = training.get("skip", ())
    return {pattern: name for pattern, name in overrides.items() if not any(fnmatchcase(pattern, one) for one in skip)}


def _insert_override(before: dict[str, str], pattern: str, name: str) -> dict[str, str]:
    """Insert one override; the first override that matches a layer applies to it.

    Coarser overrides whose layers all match the new pattern become as fine. The new override is inserted before the
    first coarser one that matches other layers too, preceded by all finer ones after that position if it would hide any
    of them.
    """
    overrides = {
        other: name if _is_within(other, pattern) and fineness(recipe) < fineness(name) else recipe
        for other, recipe in before.items()
    }
    touching = [other for other in overrides if _may_overlap(other, pattern)]
    coarser = [other for other in touching if fineness(overrides[other]) < fineness(name)]
    if not coarser:
        return overrides | {pattern: name}
    position = list(overrides).index(coarser[0])
    finer = [
        other
        for other in list(overrides)[position:]
        if fineness(overrides[other]) > fineness(name) and other != pattern
    ]
    would_hide = not _is_within(pattern, coarser[0]) and not set(finer).isdisjoint(touching)
    order = [
        *(one for one in list(overrides)[:position] if one != pattern),
        *(finer if would_hide else ()),
        pattern,
        *overrides,
    ]
    return {other: name if other == pattern else overrides[other] for other in dict.fromkeys(order)}


def _is_within(inner: str, outer: str) -> bool:
    """True if every layer that matches ``inner`` also matches ``outer``."""
    return fnmatchcase(inner.replace("*", WILDCARD_TEXT), outer)


@lru_cache(maxsize=4096)
def _may_overlap(one: str, other: str) -> bool:
    """True if some path may match both patterns; a set of characters counts as any character."""
    one, other = (CHARACTER_SET.sub("?", pattern) for pattern in (one, other))
    if not one or not other:
        return not (one + other).strip("*")
    if one[0] == "*":
        return _may_overlap(one[1:], other) or _may_overlap(one, other[1:])
    if other[0] == "*":
        return _may_overlap(other, one)
    return (one[0] == other[0] or "?" in (one[0], other[0])) and _may_overlap(one[1:], other[1:])
