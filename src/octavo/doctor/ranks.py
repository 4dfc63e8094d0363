"""Whether the ranks of a data-parallel run, whose weights are the same, cast alike."""

from typing import Any

import torch
from torch import Tensor, distributed

from octavo.doctor.series import CastKey
from octavo.doctor.statistics import CAST_FIELDS

__all__ = ["scale_ratios"]


def scale_ratios(casts: dict[CastKey, Any], device: torch.device) -> dict[str, dict[str, float]]:
    """By "path role gemm", the largest scale of any rank over the smallest: {"rank_scale_ratio": …}.

    One collective for all casts; nothing where torch.distributed is not running. Every rank must call it in the same
    step with the same layers.
    """
    if not casts or not distributed.is_available() or not distributed.is_initialized():
        return {}
    column = CAST_FIELDS.index("scale")
    scales = torch.tensor([float(numbers[column]) for numbers in casts.values()], dtype=torch.float64, device=device)
    both = torch.cat([scales, -scales])
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX)
    largest, smallest = both[: len(casts)], -both[len(casts) :]
    return {"rank_scale_ratio": dict(zip(map(" ".join, casts), _ratios(largest, smallest), strict=True))}


def _ratios(largest: Tensor, smallest: Tensor) -> list[float]:
    ratios: list[float] = (largest / smallest).tolist()
    return ratios
