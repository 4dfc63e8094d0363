"""Cast of one tensor as another engine does it: each step that engines do differently is a field.

    amax   = largest magnitude of a group, over the elements that `amax_of` names, at least `amax_floor`
    scale  = amax and `limit` divided as `division` says, in FP64, FP32 or the tensor's dtype; at least `scale_floor`;
             rounded to a power of two where `power_of_two` says so; hp ≈ codes · scale
    codes  = x / scale or x · (1 / scale), rounded to FP32 or the tensor's dtype, within ±`limit`, to the nearest code

What happens to a group of zeros, or of numbers that are not finite, is a field too.
:func:`octavo.numerics.quantize_as` computes it. A :class:`octavo.numerics.CastSpec` with such a cast as its ``engine``
is cast so in any recipe.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from octavo.errors import ConfigError
from octavo.formats import E4M3, E8M0, FP32, Format
from octavo.numerics.granularity import Granularity, PerTensor
from octavo.numerics.scaling import Scaling

__all__ = [
    "ENCODE_DIVISIONS",
    "ENCODE_ROUNDINGS",
    "AmaxOf",
    "Application",
    "Division",
    "EngineCast",
    "PowerOfTwo",
    "Saturation",
]

_PER_TENSOR = PerTensor()


class AmaxOf(StrEnum):
    """Elements that take part in an amax."""

    ALL = "all, NaN and Inf included"
    NUMBERS = "all but NaN"
    FINITE = "the finite ones"


class Division(StrEnum):
    """Division that makes a scale; two of them make the encode scale, of which the stored scale is the reciprocal."""

    LIMIT_BY_AMAX = "limit / amax"
    LIMIT_BY_RECIPROCAL = "limit * (1 / amax)"
    AMAX_BY_LIMIT = "amax / limit"
    AMAX_BY_RECIPROCAL = "amax * (1 / limit)"


class PowerOfTwo(StrEnum):
    """Rounding of a scale to a power of two; by its bits, or by FP32 logarithms, which err next to powers of two."""

    NONE = "none"
    ENCODE_DOWN = "encode scale down, by bits"
    ENCODE_DOWN_BY_LOG2 = "encode scale down, by log2"
    SCALE_UP = "scale up, by bits"
    SCALE_UP_BY_LOG2 = "scale up, by log2"


ENCODE_DIVISIONS = (Division.LIMIT_BY_AMAX, Division.LIMIT_BY_RECIPROCAL)
ENCODE_ROUNDINGS = {  # and those of a scale that give the same power of two
    PowerOfTwo.ENCODE_DOWN: PowerOfTwo.SCALE_UP,
    PowerOfTwo.ENCODE_DOWN_BY_LOG2: PowerOfTwo.SCALE_UP_BY_LOG2,
}


class Application(StrEnum):
    """Operation between a number and its scale."""

    MULTIPLY = "x * (1 / scale)"
    DIVIDE = "x / scale"


class Saturation(StrEnum):
    """Codes of infinities and NaN, which E5M2 both has; finite values beyond the limit become ±limit under all."""

    PROPAGATE = "Inf becomes NaN, NaN stays"
    SATURATE = "Inf becomes the limit, NaN stays"
    NAN_TO_LIMIT = "Inf and NaN become the limit"
    NAN_TO_MINUS_LIMIT = "Inf becomes the limit, NaN -limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCast:
    """Specification of an engine's cast; a dtype of None is that of the tensor to cast.

    Attributes:
        format: of the codes.
        granularity: which elements share a scale.
        scaling: from this tensor, from past steps, or from calibration.
        limit: magnitude that an amax is scaled to, and at which codes saturate; None is the format's maximum.
        amax_of: elements that take part in an amax.
        amax_floor: smaller amaxes count as this.
        division: of the scale.
        divided_in: dtype of that division.
        scale_floor: smaller scales count as this.
        power_of_two: rounding of the scale.
        scale_format: FP32, or E8M0 for one byte.
        zero_scale: scale of a group whose amax counts as zero; "epsilon" is that of the division's dtype, None leaves
            what the formula gives.
        zero_amax: amaxes up to this count as zero, and so does NaN; None: those whose scale comes out as 0.
        zero_encode: encode scale of such a group; None is the scale's reciprocal.
        infinite_encode: dtype whose largest number replaces an encode scale that overflows; "tensor" is that of the
            tensor, None leaves infinity.
        nonfinite_scale: scale of a group whose amax is not finite; None leaves what the formula gives.
        application: operation between a number and its scale.
        applied_in: dtype that the quotient or product is rounded to before the cast; it is computed in FP32.
        saturation: codes of infinities and NaN.
    """

    format: Format = E4M3
    granularity: Granularity = _PER_TENSOR
    scaling: Scaling = Scaling.DYNAMIC
    limit: float | None = None
    amax_of: AmaxOf = AmaxOf.ALL
    amax_floor: float = 0.0
    division: Division = Division.AMAX_BY_LIMIT
    divided_in: torch.dtype | None = torch.float32
    scale_floor: float = 0.0
    power_of_two: PowerOfTwo = PowerOfTwo.NONE
    scale_format: Format = FP32
    zero_scale: float | str | None = None
    zero_amax: float | None = 0.0
    zero_encode: float | None = None
    infinite_encode: torch.dtype | str | None = None
    nonfinite_scale: float | None = None
    application: Application = Application.MULTIPLY
    applied_in: torch.dtype | None = torch.float32
    saturation: Saturation = Saturation.SATURATE

    def __post_init__(self) -> None:
        if self.scale_format == E8M0 and self.power_of_two == PowerOfTwo.NONE:
            raise ConfigError("E8M0 holds powers of two; a cast with it needs power_of_two")
        if self.power_of_two in ENCODE_ROUNDINGS and self.division not in ENCODE_DIVISIONS:
            raise ConfigError(f"{self.power_of_two} rounds an encode scale, and {self.division} makes none")

    @property
    def largest(self) -> float:
        """The limit of the codes."""
        return self.format.max if self.limit is None else self.limit

    def of_tensors_in(self, dtype: torch.dtype) -> "EngineCast":
        """The same cast of tensors of one dtype, which it then applies to the same numbers in any dtype.

        Example:
            >>> EngineCast(divided_in=None).of_tensors_in(torch.bfloat16).divided_in
            torch.bfloat16
        """
        return replace(
            self,
            divided_in=self.divided_in or dtype,
            applied_in=self.applied_in or dtype,
            infinite_encode=dtype if isinstance(self.infinite_encode, str) else self.infinite_encode,
        )
