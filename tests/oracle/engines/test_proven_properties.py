"""What the engines' tests prove: change a property of a cast to any other value, and the compared results change.

Values are those of all profiles; of an enum, all; and of a number, some near it. Not counted are changes that no tensor
could show:

- of a field that the computation does not read, such as a scale's division where a scale is given. A property none of
  whose fields is read is not proven, unless its value says that the engine has no such step;
- of a group of zeros' scale to one that E8M0 stores as the same byte;
- of a replacement's encode scale to what it is already, 1 / scale, or where numbers are divided by the scale;
- between two floors of amaxes that have one scale, or the smallest amax for a floor of 0: scales grow with amaxes;
  likewise between two limits up to which amaxes count as zero, where that scale is the replacement already;
- between FP32 and FP64, or two forms of a division in FP64: an exact quotient of 24-bit numbers is further from the
  middle of two FP32 numbers than FP64 errs;
- between "Inf becomes NaN" and "Inf becomes the limit" where an Inf makes its own scale infinite, and so its quotient
  NaN;
- between multiplying by a power of two and dividing by its reciprocal, and of that result's dtype;
- of the scaling: it says what must be given, and no number of a result.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from octavo.engines import PROFILES, Application, Division, EngineCast, PowerOfTwo, Saturation, get, quantize_as
from octavo.engines.properties import CAST_PROPERTIES, proof_of
from octavo.errors import ConfigError
from octavo.formats import E8M0, FP32
from octavo.numerics import PerTensor
from octavo.numerics.engine_cast import ENCODE_DIVISIONS, ENCODE_ROUNDINGS, AmaxOf
from octavo.numerics.quantized import stored_scale
from octavo.recipes.engines.profile import NOT_RUN
from tests.oracle.engines.compared import COMPARED

CASTS = [role for profile in PROFILES.values() for role in (profile.weight, profile.input) if role is not None]
NEAR = (0.5, 1.5, 8.0)  # factors of a number
RECIPROCAL = {
    Division.LIMIT_BY_AMAX: Division.LIMIT_BY_RECIPROCAL,
    Division.LIMIT_BY_RECIPROCAL: Division.LIMIT_BY_AMAX,
}


class ReadFields:
    """A cast that keeps the names of the fields that are read."""

    def __init__(self, cast: EngineCast) -> None:
        self._cast = cast
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add("limit" if name == "largest" else name)
        return getattr(self._cast, name)


def other_values(original: EngineCast, name: str) -> Iterator[EngineCast]:
    """The cast with each other value of a field that it can have."""
    value = getattr(original, name)
    values = {getattr(each, name) for each in CASTS} | (set(type(value)) if isinstance(value, StrEnum) else set())
    if isinstance(value, float):  # whose reciprocal FP32 holds
        values |= {value * each for each in NEAR if value * each * FP32.max >= 1}
    for other in values - {value}:
        changes: dict[str, Any] = {name: other}
        if name == "division" and other not in ENCODE_DIVISIONS:
            changes["power_of_two"] = ENCODE_ROUNDINGS.get(original.power_of_two, original.power_of_two)
        try:
            yield replace(original, **changes)
        except ConfigError:
            continue


def is_same_for_all_tensors(original: EngineCast, changed: EngineCast, name: str) -> bool:
    """Whether one of the reasons above makes a change invisible."""
    rule = SAME.get(name)
    return rule is not None and rule(original, changed)


def _same_zero_amax(original: EngineCast, changed: EngineCast) -> bool:
    limits = (original.zero_amax, changed.zero_amax)
    without = replace(original, zero_scale=None)
    scales = {float(_scale_of(without, amax)) for amax in (2.0**-149, *filter(None, limits))}
    return None not in limits and scales == {original.zero_scale}


def _same_amax_floor(original: EngineCast, changed: EngineCast) -> bool:
    lower, higher = sorted((original.amax_floor, changed.amax_floor))
    return torch.equal(_scale_of(original, max(2.0**-149, lower)), _scale_of(original, higher))


def _same_zero_scale(original: EngineCast, changed: EngineCast) -> bool:
    values = (original.zero_scale, changed.zero_scale)
    numbers = [torch.tensor(each) for each in values if isinstance(each, float)]
    stored = [stored_scale(each, original.scale_format) for each in numbers]
    return (
        original.scale_format == E8M0 and len(stored) == 2 and torch.equal(*(each.view(torch.uint8) for each in stored))
    )


def _same_zero_encode(original: EngineCast, changed: EngineCast) -> bool:
    values = {original.zero_encode, changed.zero_encode}
    is_reciprocal = isinstance(original.zero_scale, float) and values == {None, 1 / original.zero_scale}
    return is_reciprocal or original.application is Application.DIVIDE


def _same_divided_in(original: EngineCast, changed: EngineCast) -> bool:
    divides_once = original.division in (Division.AMAX_BY_LIMIT, Division.LIMIT_BY_AMAX)
    return divides_once and {original.divided_in, changed.divided_in} == {torch.float32, torch.float64}


def _same_division(original: EngineCast, changed: EngineCast) -> bool:
    return original.divided_in is torch.float64 and RECIPROCAL.get(original.division) is changed.division


def _same_saturation(original: EngineCast, changed: EngineCast) -> bool:
    is_measured = original.amax_of is AmaxOf.ALL and original.scaling == "dynamic"
    has_infinite_scale = is_measured and original.nonfinite_scale is None and original.scale_format == FP32
    return has_infinite_scale and {original.saturation, changed.saturation} == {
        Saturation.PROPAGATE,
        Saturation.SATURATE,
    }


def _has_powers_of_two(original: EngineCast, _: EngineCast) -> bool:
    return original.power_of_two is not PowerOfTwo.NONE


SAME: dict[str, Callable[[EngineCast, EngineCast], bool]] = {
    "zero_amax": _same_zero_amax,
    "zero_scale": _same_zero_scale,
    "amax_floor": _same_amax_floor,
    "zero_encode": _same_zero_encode,
    "divided_in": _same_divided_in,
    "division": _same_division,
    "saturation": _same_saturation,
    "application": _has_powers_of_two,
    "applied_in": _has_powers_of_two,
    "scaling": lambda *_: True,
}


def _scale_of(original: EngineCast, amax: float) -> Tensor:
    """Scale of an amax without a floor of amaxes."""
    without = replace(original, amax_floor=0.0, granularity=PerTensor())
    return quantize_as(torch.zeros(1), without, amax=torch.tensor(amax)).fp32_scale


def is_noticed(engine: str, role: str, changed: EngineCast) -> bool:
    """Whether the compared results show a change; a scale of another shape is one."""
    compared = COMPARED[engine, role]
    original = getattr(get(engine), role)
    try:
        pairs = zip(compared.results(original), compared.results(changed), strict=True)
        return any(
            a.shape != b.shape or not torch.equal(a.nan_to_num(-7777), b.nan_to_num(-7777))
            for ours, theirs in pairs
            for a, b in zip(ours, theirs, strict=True)
        )
    except (ConfigError, IndexError):
        return changed.granularity != original.granularity


def unnoticed(engine: str, role: str) -> dict[str, list[str]]:
    """Values of each property that the comparison would not notice; "not read" where it reads none of its fields."""
    original = getattr(get(engine), role)
    reader = ReadFields(original)
    for _ in COMPARED[engine, role].results(cast(EngineCast, reader)):
        pass
    missed: dict[str, list[str]] = {}
    for group in CAST_PROPERTIES:
        read = [name for name in group if name in reader.names]
        if not read and getattr(original, group[0]) is not None:
            missed[group[0]] = ["not read"]
        for name in read:
            for changed in other_values(original, name):
                if not is_same_for_all_tensors(original, changed, name) and not is_noticed(engine, role, changed):
                    missed.setdefault(group[0], []).append(f"{name} {getattr(changed, name)}")
    return missed


@pytest.mark.long
@pytest.mark.parametrize(("engine", "role"), COMPARED)
def test_a_proven_property_cannot_change_unnoticed(engine, role):
    proven = {name for (name, *_) in CAST_PROPERTIES if proof_of(get(engine), f"{role}.{name}") != NOT_RUN}
    missed = unnoticed(engine, role)
    assert {name: values for name, values in missed.items() if name in proven} == {}


def test_every_cast_with_a_test_of_the_engine_s_own_code_is_changed():
    claimed = {
        (name, role)
        for name, profile in PROFILES.items()
        for role in ("weight", "input")
        for field in fields(EngineCast)
        if profile.sources[role].project != "octavo" and "oracle" in proof_of(profile, f"{role}.{field.name}")
    }
    assert claimed == set(COMPARED)
