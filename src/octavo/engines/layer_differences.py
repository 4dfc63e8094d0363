"""Difference of two engines in one linear layer: codes, scales and outputs.

Codes are compared on the same numbers: the weight, and the trainer's input. Two scales are compared group by group, or
element by element where the engines have other groups; two codes by their values, in steps of the format where that is
the same. The output's error is relative, ‖y − y_trainer‖ / ‖y_trainer‖.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.numerics import QuantizedTensor

__all__ = ["CodesDifference", "compare_codes", "relative_error", "total_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesDifference:
    """Codes and scales of two casts of the same numbers.

    Attributes:
        codes: number of elements.
        codes_differ: number of elements with other codes.
        first: index of the first of them; None if there is none.
        largest_step: largest distance of two codes, in steps of the format; None for two formats.
        scales: number of scales compared.
        scales_differ: number of scales that differ.
        largest_scale: largest |ratio − 1| of two scales.
    """

    codes: int
    codes_differ: int
    first: tuple[int, ...] | None
    largest_step: int | None
    scales: int
    scales_differ: int
    largest_scale: float

    @property
    def share(self) -> float:
        """Share of codes that differ."""
        return self.codes_differ / max(1, self.codes)

    @property
    def is_equal(self) -> bool:
        """Whether all codes and scales are equal."""
        return not (self.codes_differ or self.scales_differ)


def compare_codes(ours: QuantizedTensor, theirs: QuantizedTensor) -> CodesDifference:
    """Compare two casts of the same tensor.

    Example:
        >>> import octavo
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> a, b = octavo.quantize(x, octavo.E4M3), octavo.quantize(x, octavo.E4M3, granularity=octavo.PerRow())
        >>> compare_codes(a, b).is_equal
        True
    """
    differ = _differ(ours.data.float(), theirs.data.float())
    places = differ.nonzero()
    scale, other = ours.fp32_scale, theirs.fp32_scale
    if ours.granularity != theirs.granularity:
        scale = ours.granularity.expand(scale, ours.shape).expand(ours.shape)
        other = theirs.granularity.expand(other, theirs.shape).expand(theirs.shape)
    scales_differ = _differ(scale, other)
    ratio = torch.where(scales_differ, other.double() / scale.double(), 1.0)
    return CodesDifference(
        codes=differ.numel(),
        codes_differ=len(places),
        first=tuple(places[0].tolist()) if len(places) else None,
        largest_step=_largest_step(ours, theirs) if ours.data.dtype == theirs.data.dtype else None,
        scales=scale.numel(),
        scales_differ=int(scales_differ.sum()),
        largest_scale=float((ratio - 1).abs().max()) if ratio.numel() else 0.0,
    )


def _differ(ours: Tensor, theirs: Tensor) -> Tensor:
    """Where numbers differ; two NaN are equal."""
    return (ours != theirs) & ~(ours.isnan() & theirs.isnan())


def total_of(parts: "list[CodesDifference]") -> CodesDifference:
    """Sum of several windows' differences, with the first place of the first that has one."""
    steps = [part.largest_step for part in parts if part.largest_step is not None]
    return CodesDifference(
        codes=sum(part.codes for part in parts),
        codes_differ=sum(part.codes_differ for part in parts),
        first=next((part.first for part in parts if part.first is not None), None),
        largest_step=max(steps) if steps else None,
        scales=sum(part.scales for part in parts),
        scales_differ=sum(part.scales_differ for part in parts),
        largest_scale=max(part.largest_scale for part in parts),
    )


def relative_error(y: Tensor, expected: Tensor) -> float:
    """‖y − expected‖ / ‖expected‖ in FP64; 0 where both are zero."""
    error, size = (y.double() - expected.double()).norm(), expected.double().norm()
    return float(error / size) if error else 0.0


def _largest_step(ours: QuantizedTensor, theirs: QuantizedTensor) -> int:
    """Largest distance in the order of the format's numbers, in which -0 and 0 are one."""
    a, b = (_order(codes.data) for codes in (ours, theirs))
    return int((a - b).abs().max()) if a.numel() else 0


def _order(codes: Tensor) -> Tensor:
    bits = codes.view(torch.uint8).short()
    magnitude = bits & 0x7F
    return torch.where(bits > 0x7F, -magnitude, magnitude)
