"""Codes of OCP's FP8 formats as FNUZ codes, those of AMD's MI300, and back.

An FNUZ format has an exponent bias larger by one: the same byte has half the value, and twice the scale restores it.

    OCP → FNUZ     same byte, scale · 2         FNUZ → OCP     same byte, scale / 2

| byte                  | OCP              | FNUZ                         |
|-----------------------|------------------|------------------------------|
| 0x80                  | -0               | NaN                          |
| E4M3 0x7F, 0xFF       | NaN              | ±240, the maximum            |
| E5M2 0x7C, 0xFC       | ±Inf             | ±32,768                      |
| E5M2 0x7D-7F, 0xFD-FF | NaN              | ±40,960, ±49,152, ±57,344    |

OCP → FNUZ keeps every finite value and NaN, and loses the sign of zero; ±Inf becomes NaN. FNUZ → OCP keeps every value
of a group (of one scale) that has no code beyond OCP's maximum. In a group that has one, the scale stays as it is: all
values lie in OCP's range then, and those below its smallest normal number with an odd last bit are rounded. The same
happens where a scale cannot be doubled or halved exactly in its dtype. :class:`Converted` counts what was not kept.

Source: Noune et al., arXiv 2206.02915; OCP 8-bit Floating Point Specification 1.0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, E8M0, Format
from octavo.numerics.cast import cast_nearest
from octavo.numerics.quantized import QuantizedTensor

__all__ = ["FNUZ_FORMATS", "OCP_FORMATS", "Converted", "to_fnuz", "to_ocp"]

FNUZ_FORMATS = {E4M3: E4M3_FNUZ, E5M2: E5M2_FNUZ}
OCP_FORMATS = {fnuz: ocp for ocp, fnuz in FNUZ_FORMATS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A tensor with codes of the other family.

    Attributes:
        tensor: codes and scales after the conversion.
        changed: number of elements that decode to another value; -0 equals 0, and NaN equals NaN.
        largest_change: the largest difference of a finite value; 0 where all are kept.
    """

    tensor: QuantizedTensor
    changed: int
    largest_change: float


def to_fnuz(q: QuantizedTensor) -> Converted:
    """Convert OCP codes to FNUZ codes.

    Raises:
        ConfigError: the codes are not E4M3 or E5M2.

    Example:
        >>> from octavo.numerics import PerTensor, quantize
        >>> q = quantize(torch.tensor([1.75, -0.0, -3.5]), E4M3)
        >>> converted = to_fnuz(q)
        >>> converted.tensor.dequantize(), (converted.tensor.scale / q.scale).item(), converted.changed
        (tensor([ 1.7500,  0.0000, -3.5000]), 2.0, 0)
    """
    return _converted(q, FNUZ_FORMATS, "E4M3 and E5M2", doubled=True)


def to_ocp(q: QuantizedTensor) -> Converted:
    """Convert FNUZ codes to OCP codes.

    Raises:
        ConfigError: the codes are not E4M3_FNUZ or E5M2_FNUZ.

    Example:
        >>> from octavo.numerics import PerTensor
        >>> codes = torch.tensor([120.0, 2.0**-10, 240.0]).to(torch.float8_e4m3fnuz)
        >>> scale = torch.tensor(1.0)
        >>> to_ocp(QuantizedTensor(codes[:2], scale, PerTensor(), torch.float32)).tensor.data.float()
        tensor([2.4000e+02, 1.9531e-03])
        >>> converted = to_ocp(QuantizedTensor(codes, scale, PerTensor(), torch.float32))  # 480 is beyond OCP's E4M3
        >>> converted.tensor.data.float(), converted.changed, converted.largest_change == 2.0**-10
        (tensor([120.,   0., 240.]), 1, True)
    """
    return _converted(q, OCP_FORMATS, "E4M3_FNUZ and E5M2_FNUZ", doubled=False)


def _converted(q: QuantizedTensor, targets: dict[Format, Format], allowed: str, *, doubled: bool) -> Converted:
    target = targets.get(q.format)
    if target is None:
        raise ConfigError(f"codes to convert are {allowed}, not {q.format}")
    moved, exact = _moved_scale(q.scale, doubled=doubled)
    values = q.data.float()
    nonfinite = ~values.isfinite()
    magnitudes = q.data.view(torch.uint8) & q.format.magnitude_mask
    beyond = (magnitudes > target.max_code) & ~nonfinite
    same = (q.granularity.reduce_max(beyond.float()) == 0) & exact  # groups that keep their bytes
    data = torch.where(
        q.granularity.expand(same, q.shape),
        _same_bytes(q.data, nonfinite, target),
        cast_nearest(values, target).view(torch.uint8),
    )
    result = QuantizedTensor(
        data.view(target.torch_dtype), torch.where(same, moved, q.scale), q.granularity, q.hp_dtype
    )
    before, after = _exact_values(q), _exact_values(result)
    changed = (before != after) & ~(before.isnan() & after.isnan())
    differences = (before - after).abs()[changed & before.isfinite()]
    return Converted(
        tensor=result,
        changed=int(changed.sum()),
        largest_change=differences.max().item() if differences.numel() else 0.0,
    )


def _moved_scale(scale: Tensor, *, doubled: bool) -> tuple[Tensor, Tensor]:
    """The scale doubled or halved, and where that is exact."""
    if scale.dtype is torch.uint8:
        exponents = scale.int() + (1 if doubled else -1)
        return exponents.clamp(0, E8M0.max_code).to(torch.uint8), (exponents >= 0) & (exponents <= E8M0.max_code)
    moved = scale * 2 if doubled else scale / 2
    return moved, moved.isfinite() & (moved.double() == scale.double() * (2 if doubled else 0.5))


def _same_bytes(codes: Tensor, nonfinite: Tensor, target: Format) -> Tensor:
    """The same bytes; a zero without a sign, and NaN where ``target`` has no code for the value."""
    codes_as_bytes = codes.view(torch.uint8)
    unsigned = torch.where(codes.float() == 0, 0, codes_as_bytes)
    return torch.where(nonfinite, target.nan_codes[0], unsigned)


def _exact_values(q: QuantizedTensor) -> Tensor:
    return q.data.double() * q.granularity.expand(q.fp32_scale, q.shape).double()
