"""Description of one cast to FP8, from a recipe through dispatch to every cast backend.

Results of elements that are not finite, on every backend (``CastSpec.nonfinite``; octavo.numerics.cast defines them):

| input       | PROPAGATE, the default     | SATURATE |
|-------------|----------------------------|----------|
| NaN         | NaN                        | NaN      |
| ±Inf        | E4M3: NaN, E5M2: ±Inf      | ±maximum |
| finite, too large after scaling | ±maximum | ±maximum |

They change no other element: a scale is computed from the finite elements' amax. Training counts them by layer and role
(``octavo.nonfinite_counts``).
"""

import math
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.formats import E8M0, FP32, Format
from octavo.numerics.cast import NONFINITE_POLICIES, Nonfinite, Rounding, check_fp8_format, check_member
from octavo.numerics.engine_cast import EngineCast
from octavo.numerics.granularity import Granularity, PerTensor, granularity_or_default
from octavo.numerics.scaling import AMAX_FLOOR, ScaleRounding, Scaling

__all__ = ["LARGEST_MARGIN", "CastSpec", "check_integer", "check_member", "is_number"]


LARGEST_MARGIN = 4096  # binades that kernels are passed at most: below what FP64 holds
_PER_TENSOR = PerTensor()
_SCALINGS, _ROUNDINGS, _SCALE_ROUNDINGS = tuple(Scaling), tuple(Rounding), tuple(ScaleRounding)  # no graph traces these
_SCALE_FORMATS = (FP32, E8M0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """Specification of a cast to FP8.

    Attributes:
        format: an FP8 format.
        granularity: which elements share a scale.
        scaling: source of a recipe's scale; delayed and static need one scale for the tensor. A backend casts with the
            amax or the scale that it is passed, and measures the tensor where neither is.
        scale_rounding: which numbers the scale may be (numerics/scaling.py).
        scale_format: FP32, or E8M0 for one byte a scale.
        amax_floor: smaller amaxes count as this; 0 leaves every tensor a scale of its own.
        margin: binades left free above amax, 0 or more.
        nonfinite: result of an infinite element; see the table above.
        rounding: to the nearest code, or, of gradients, to either neighbour by chance; its seeds are drawn from torch's
            default generator of the CPU.
        engine: cast of another engine, which makes codes and scales as its own fields say; ``scale_rounding``,
            ``amax_floor``, ``margin``, ``nonfinite`` and ``rounding`` then only describe it.
    """

    format: Format
    granularity: Granularity = _PER_TENSOR
    scaling: Scaling = Scaling.DYNAMIC
    scale_rounding: ScaleRounding = ScaleRounding.FP32
    scale_format: Format = FP32
    amax_floor: float = AMAX_FLOOR
    margin: int = 0
    nonfinite: Nonfinite = Nonfinite.PROPAGATE
    rounding: Rounding = Rounding.NEAREST
    engine: EngineCast | None = None

    def __post_init__(self) -> None:
        check_fp8_format(self.format)
        granularity_or_default(self.granularity)
        check_member("a cast's scaling", self.scaling, _SCALINGS)
        check_member("a cast's nonfinite", self.nonfinite, NONFINITE_POLICIES)
        check_member("a cast's rounding", self.rounding, _ROUNDINGS)
        check_member("a cast's scale_rounding", self.scale_rounding, _SCALE_ROUNDINGS)
        check_member("a cast's scale_format", self.scale_format, _SCALE_FORMATS)
        if self.scale_format == E8M0 and self.scale_rounding == ScaleRounding.FP32:
            raise ConfigError("E8M0 holds powers of two; a cast with it needs scale_rounding rceil, floor or even")
        if self.scaling != Scaling.DYNAMIC and not isinstance(self.granularity, PerTensor):
            raise ConfigError(
                f"{self.scaling} scaling keeps one number a tensor; {self.granularity} needs dynamic scaling"
            )
        if not is_number(self.amax_floor) or not 0 <= self.amax_floor < math.inf:
            raise ConfigError(f"amax_floor must be 0 or more and finite, not {self.amax_floor}")
        check_integer("a cast's margin", self.margin, least=0)
        for name in () if self.engine is None else ("format", "granularity", "scale_format"):
            if getattr(self, name) != getattr(self.engine, name):
                raise ConfigError(f"a cast and its engine's have one {name}, not {getattr(self, name)} and another")


def is_number(value: object) -> bool:
    """Return whether ``value`` is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_integer(what: str, value: object, *, least: int) -> None:
    """Raise ConfigError unless ``value`` is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, not {value!r}")
