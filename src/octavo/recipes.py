"""Recipes: which operand of which GEMM is cast how, and where its scale comes from.

A linear layer multiplies three times, always as ``a @ b.T`` with the summed dimension last:

| GEMM          | a                     | b                | result                |
|---------------|-----------------------|------------------|-----------------------|
| `output`      | input [M, K]          | weight [N, K]    | output [M, N]         |
| `grad_input`  | grad_output [M, N]    | weight.T [K, N]  | grad_input [M, K]     |
| `grad_weight` | grad_output.T [N, M]  | input.T [K, M]   | grad_weight [N, K]    |

The presets (sources: the published recipes named in each docstring):

| preset       | input | weight | grad_output | scale                                            |
|--------------|-------|--------|-------------|--------------------------------------------------|
| `bf16`       | –     | –      | –           | none: the surrounding precision                  |
| `tensorwise` | E4M3  | E4M3   | E5M2        | per tensor, from this tensor                     |
| `rowwise`    | E4M3  | E4M3   | E4M3        | per row of each GEMM's operand, power of two     |
| `delayed`    | E4M3  | E4M3   | E5M2        | per tensor, from finished steps                  |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, Format
from octavo.numerics import Granularity, Nonfinite, PerRow, PerTensor
from octavo.numerics.cast import check_fp8_format
from octavo.numerics.granularity import granularity_or_default
from octavo.numerics.scaling import AMAX_FLOOR

__all__ = ["CastSpec", "GemmSpec", "History", "Recipe", "Scaling", "Statistic", "get", "names"]


class Scaling(StrEnum):
    """Where a scale comes from."""

    DYNAMIC = "dynamic"  # this tensor
    DELAYED = "delayed"  # finished steps


class Statistic(StrEnum):
    """What delayed scaling takes from its window of amaxes."""

    MAX = "max"
    LATEST = "latest"
    MEAN = "mean"  # of the encode scales, as the source article describes; overflows while amax grows


_PER_TENSOR = PerTensor()


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """How one operand becomes FP8.

    Attributes:
        format: an FP8 format.
        granularity: which elements share a scale.
        scaling: where the scale comes from; delayed needs one scale for the tensor.
        power_of_two: round encode scales down to powers of two.
        amax_floor: smaller amaxes count as this.
        margin: binades left free above amax, 0 or more.
        nonfinite: what an infinite element becomes.
    """

    format: Format
    granularity: Granularity = _PER_TENSOR
    scaling: Scaling = Scaling.DYNAMIC
    power_of_two: bool = False
    amax_floor: float = AMAX_FLOOR
    margin: int = 0
    nonfinite: Nonfinite = Nonfinite.PROPAGATE

    def __post_init__(self) -> None:
        check_fp8_format(self.format)
        granularity_or_default(self.granularity)
        _check_member("a cast's scaling", self.scaling, tuple(Scaling))
        _check_member("a cast's nonfinite", self.nonfinite, tuple(Nonfinite))
        _check_member("a cast's power_of_two", self.power_of_two, (False, True))
        if self.scaling == Scaling.DELAYED and not isinstance(self.granularity, PerTensor):
            raise ConfigError(f"delayed scaling keeps one amax a tensor; {self.granularity} needs dynamic scaling")
        if not 0 <= self.amax_floor < math.inf:
            raise ConfigError(f"amax_floor must be 0 or more and finite, not {self.amax_floor}")
        _check_whole("a cast's margin", self.margin, least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """How the operands of ``a @ b.T`` are cast (None leaves both in high precision) and how the tensor core may sum."""

    a: CastSpec | None
    b: CastSpec | None
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ConfigError("a GEMM casts both operands or neither; give both a CastSpec or both None")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """How delayed scaling turns the amaxes of finished steps into one.

    Attributes:
        length: number of steps kept, 1 or more.
        statistic: what is taken from them.
        update_interval: steps between two changes of the scale, 1 or more.
    """

    length: int = 16
    statistic: Statistic = Statistic.MAX
    update_interval: int = 1

    def __post_init__(self) -> None:
        _check_whole("a history's length", self.length, least=1)
        _check_whole("a history's update_interval", self.update_interval, least=1)
        if self.statistic not in list(Statistic):
            raise ConfigError(f"a history's statistic must be one of {', '.join(Statistic)}, not {self.statistic!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A full specification of a linear layer's casts and GEMMs.

    Example:
        >>> recipe = get("tensorwise")
        >>> recipe.grad_input.a.format.name, recipe.output.fast_accumulation
        ('E5M2', True)
    """

    name: str
    output: GemmSpec
    grad_input: GemmSpec
    grad_weight: GemmSpec
    history: History | None = None

    def __post_init__(self) -> None:
        delayed = any(cast.scaling == Scaling.DELAYED for cast in self.casts)
        if delayed != self.is_delayed:
            raise ConfigError(f"recipe {self.name!r} must have a history if, and only if, one of its casts is delayed")

    @property
    def casts(self) -> tuple[CastSpec, ...]:
        """Every cast of the three GEMMs, in their order."""
        operands = (side for gemm in (self.output, self.grad_input, self.grad_weight) for side in (gemm.a, gemm.b))
        return tuple(cast for cast in operands if cast is not None)

    @property
    def is_delayed(self) -> bool:
        """Whether any cast takes its scale from finished steps."""
        return self.history is not None

    @property
    def is_high_precision(self) -> bool:
        """Whether nothing is cast to FP8."""
        return self.output.a is None and self.grad_input.a is None and self.grad_weight.a is None


def get(name: str | Recipe, **options: Any) -> Recipe:
    """A preset by name; a :class:`Recipe` passes through.

    Args:
        name: one of :func:`names`.
        options: the preset's own options, such as ``history_length`` for "delayed".

    Raises:
        ConfigError: an unknown name or option, or an option's value out of range.

    Example:
        >>> get("delayed", history_length=4).history.length
        4
    """
    if isinstance(name, Recipe):
        if options:
            raise ConfigError(f"options ({', '.join(options)}) go with a preset's name, not with a finished recipe")
        return name
    preset = _PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"there is no recipe {name!r}; use one of {', '.join(names())}")
    allowed = preset.__kwdefaults__ or {}
    unknown = [option for option in options if option not in allowed]
    if unknown:
        choice = f"takes {', '.join(allowed)}" if allowed else "takes no options"
        raise ConfigError(f"recipe {name!r} has no option {unknown[0]!r}; it {choice}")
    return preset(**options)


def names() -> tuple[str, ...]:
    """The presets' names."""
    return tuple(_PRESETS)


def _bf16() -> Recipe:
    """Nothing is cast: a layer of this recipe runs in the surrounding precision."""
    plain = GemmSpec(a=None, b=None)
    return Recipe(name="bf16", output=plain, grad_input=plain, grad_weight=plain)


def _tensorwise() -> Recipe:
    """One dynamic scale a tensor; fast accumulation for the output only (torchao's tensorwise recipe)."""
    forward, backward = CastSpec(format=E4M3), CastSpec(format=E5M2)
    return _one_cast_per_tensor("tensorwise", forward, backward)


def _delayed(*, history_length: int = 16, statistic: str = "max", margin: int = 0, update_interval: int = 1) -> Recipe:
    """One scale a tensor from finished steps (arXiv 2209.05433 §3; TE's DelayedScaling)."""
    if statistic not in list(Statistic):
        raise ConfigError(f"statistic must be one of {', '.join(Statistic)}, not {statistic!r}")
    forward = CastSpec(format=E4M3, scaling=Scaling.DELAYED, margin=margin)
    backward = CastSpec(format=E5M2, scaling=Scaling.DELAYED, margin=margin)
    history = History(length=history_length, statistic=Statistic(statistic), update_interval=update_interval)
    return _one_cast_per_tensor("delayed", forward, backward, history)


def _rowwise() -> Recipe:
    """A power-of-two scale for each row of each GEMM's operand, E4M3 throughout (torchao's rowwise recipe)."""
    row = CastSpec(format=E4M3, granularity=PerRow(), power_of_two=True)
    return Recipe(
        name="rowwise",
        output=GemmSpec(a=row, b=row, fast_accumulation=True),
        grad_input=GemmSpec(a=row, b=row),
        grad_weight=GemmSpec(a=row, b=row),
    )


def _one_cast_per_tensor(name: str, forward: CastSpec, backward: CastSpec, history: History | None = None) -> Recipe:
    """Each tensor cast once and used by two GEMMs: three quantizations a step, not six."""
    return Recipe(
        name=name,
        output=GemmSpec(a=forward, b=forward, fast_accumulation=True),
        grad_input=GemmSpec(a=backward, b=forward),
        grad_weight=GemmSpec(a=backward, b=forward),
        history=history,
    )


def _check_member(what: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{what} must be one of {', '.join(map(str, allowed))}, not {value!r}")


def _check_whole(what: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, not {value!r}")


_PRESETS: dict[str, Callable[..., Recipe]] = {
    "bf16": _bf16,
    "tensorwise": _tensorwise,
    "rowwise": _rowwise,
    "delayed": _delayed,
}
