"""Properties in which profiles differ, and profiles with one of them swapped.

A property is a field of a profile, or of one of its casts as ``weight.…`` and ``input.…``. Fields that mean something
only together are one property, under the name of the first (:data:`TOGETHER`). Where a swapped division makes no encode
scale, the rounding of one becomes that of the scale to the same power of two.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from octavo.errors import ConfigError
from octavo.numerics.engine_cast import ENCODE_DIVISIONS, ENCODE_ROUNDINGS, EngineCast
from octavo.parsing import did_you_mean
from octavo.recipes.engines.profile import EngineProfile, Source, in_words, properties_of, source_of

__all__ = ["differences", "is_proven", "neighbours", "proof_of", "unproven", "value_in_words", "with_property"]

TOGETHER = (  # E8M0 holds powers of two; static scales are one a tensor; a limit is one of the format
    ("power_of_two", "scale_format"),
    ("granularity", "scaling"),
    ("format", "limit"),
    ("zero_scale", "zero_amax", "zero_encode"),
)
CASTS = ("weight", "input")
IN_GROUPS = {name: group for group in TOGETHER for name in group}
CAST_PROPERTIES = tuple(dict.fromkeys(IN_GROUPS.get(f.name, (f.name,)) for f in fields(EngineCast)))
OTHERS = tuple(f.name for f in fields(EngineProfile) if f.name not in ("name", "engine", "sources", *CASTS))


def differences(ours: EngineProfile, theirs: EngineProfile) -> tuple[str, ...]:
    """Names of the properties in which two profiles differ.

    Example:
        >>> from octavo.engines import get
        >>> differences(get("vllm-block"), get("vllm-block-cuda"))
        ('input.division', 'input.saturation')
    """
    return tuple(name for name in _names(ours, theirs) if _values(ours, name) != _values(theirs, name))


def with_property(profile: EngineProfile, name: str, other: EngineProfile) -> EngineProfile:
    """A profile with one property of another.

    Raises:
        ConfigError: there is no such property, or it is one of a cast that one of the profiles does not make.

    Example:
        >>> from octavo.engines import get
        >>> with_property(get("te-block"), "input.amax_floor", get("vllm-block")).input.amax_floor
        1e-10
    """
    _check_name(name, profile, other)
    role, _, first = name.partition(".")
    if not first:
        return replace(profile, **{role: getattr(other, role)})
    group = _group(first)
    cast: EngineCast = getattr(profile, role)
    values: dict[str, Any] = {field: getattr(getattr(other, role), field) for field in group}
    division, rounding = (values.get(field, getattr(cast, field)) for field in ("division", "power_of_two"))
    if division not in ENCODE_DIVISIONS:
        values["power_of_two"] = ENCODE_ROUNDINGS.get(rounding, rounding)
    changes: dict[str, Any] = {role: replace(cast, **values)}
    return replace(profile, **changes)


def neighbours(profile: EngineProfile, catalogue: Iterable[EngineProfile]) -> Iterator[tuple[str, str, EngineProfile]]:
    """Profiles that differ in one property, whose value some profile of a catalogue has: name, value, profile."""
    seen = set()
    for other in catalogue:
        for name in differences(profile, other):
            key = name, _values(other, name)
            if key not in seen:
                seen.add(key)
                yield name, value_in_words(other, name), with_property(profile, name, other)


def value_in_words(profile: EngineProfile, name: str) -> str:
    """Value of a property.

    Example:
        >>> from octavo.engines import get
        >>> value_in_words(get("vllm-block-ue8m0"), "input.power_of_two")
        'scale up, by log2; FP32'
    """
    if name in CASTS:
        return "not cast" if getattr(profile, name) is None else "cast"
    words = properties_of(profile)
    role, _, first = name.partition(".")
    if not first:
        return words.get(name, "cast")
    parts = [words.get(f"{role}.{field}", in_words(getattr(getattr(profile, role), field))) for field in _group(first)]
    return "; ".join(parts)


def proof_of(profile: EngineProfile, name: str) -> str:
    """The test that proves a property, with what limits it, or "read, not run"."""
    return _weakest_source(profile, name).proof


def is_proven(profile: EngineProfile, name: str) -> bool:
    """Whether a test proves a property by the engine's own code.

    Example:
        >>> from octavo.engines import get
        >>> is_proven(get("torchao-rowwise"), "input.division"), is_proven(get("vllm-token"), "input.division")
        (True, False)
    """
    return _weakest_source(profile, name).is_proven


def _weakest_source(profile: EngineProfile, name: str) -> Source:
    role, _, first = name.partition(".")
    sources = (
        [source_of(profile, f"{role}.{field}") for field in _group(first)] if first else [source_of(profile, name)]
    )
    return min(sources, key=lambda source: (source.is_proven, bool(source.test)))


def unproven(profile: EngineProfile) -> tuple[str, ...]:
    """Properties of a profile that are read, not run, on the engine's own hardware.

    Example:
        >>> from octavo.engines import get
        >>> unproven(get("octavo-token"))
        ()
    """
    names = (*(name for name, value in zip(CASTS, (profile.weight, profile.input), strict=True) if value), *OTHERS)
    every: list[str] = []
    for name in names:
        every += [f"{name}.{group[0]}" for group in CAST_PROPERTIES] if name in CASTS else [name]
    return tuple(name for name in every if not is_proven(profile, name))


def _group(first: str) -> tuple[str, ...]:
    return IN_GROUPS.get(first, (first,))


def _check_name(name: str, *profiles: EngineProfile) -> None:
    role, _, first = name.partition(".")
    fields_of_casts = [f"{cast}.{field}" for cast in CASTS for group in CAST_PROPERTIES for field in group]
    if name not in (*CASTS, *OTHERS, *fields_of_casts):
        raise ConfigError(
            f"there is no property {name!r}{did_you_mean(name, fields_of_casts)}; use one of "
            f"{', '.join((*CASTS, *OTHERS))}, or a field of EngineCast as weight.… or input.…"
        )
    for profile in profiles:
        if first and getattr(profile, role) is None:
            raise ConfigError(f"{profile.name} casts no {role}, so {name} has no value; use {role!r}")


def _names(ours: EngineProfile, theirs: EngineProfile) -> Iterator[str]:
    for role in CASTS:
        if None in (getattr(ours, role), getattr(theirs, role)):
            yield role
        else:
            yield from (f"{role}.{group[0]}" for group in CAST_PROPERTIES)
    yield from OTHERS


def _values(profile: EngineProfile, name: str) -> tuple[object, ...]:
    role, _, first = name.partition(".")
    value = getattr(profile, role)
    return (value,) if not first else tuple(getattr(value, field) for field in _group(first))
