"""Several remedies in one configuration, none of which undoes another."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

from octavo import recipes
from octavo.doctor.findings import Remedy
from octavo.doctor.remedies.case import fineness
from octavo.errors import ConfigError

__all__ = ["applied"]

BOUNDED = {"lr", "min_lr", "warmup", "grad_accumulation", "weight_decay"}


def applied(config: Mapping[str, Any], remedies: Iterable[Remedy]) -> dict[str, Any]:
    """A configuration with the changes of all remedies.

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
    """Overrides with new ones among them: the first that matches counts, so none stands before a finer one.

    Those of layers that are kept out of FP8 are left out.
    """
    before: dict[str, str] = training.get("overrides", {})
    found = [(pattern, name) for pattern, name in before.items() if pattern not in new]
    for pattern, name in new.items():
        wanted = _finer_recipe(name, before.get(pattern))
        finer = [index for index, (_, other) in enumerate(found) if fineness(other) >= fineness(wanted)]
        found.insert(max(finer, default=-1) + 1, (pattern, wanted))
    skip = training.get("skip", ())
    return {pattern: name for pattern, name in found if not any(fnmatchcase(pattern, one) for one in skip)}
