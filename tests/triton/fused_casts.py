"""The casts that fused kernels make, by name, and what a result must become under them."""

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, E8M0
from octavo.kernels import ScaleRule
from octavo.kernels.result_cast import CastResult, ResultCast
from octavo.numerics import Nonfinite, PerBlock, PerRow, PerTensor, QuantizedTensor, ScaleRounding, quantize
from octavo.numerics.scaling import AMAX_FLOOR, measure

_EXACT, _POWERS = ScaleRule(ScaleRounding.FP32, AMAX_FLOOR, 0), ScaleRule(ScaleRounding.RCEIL, AMAX_FLOOR, 0)

CASTS = {
    "tensor": ResultCast(format=E4M3, granularity=PerTensor(), rule=_EXACT, transpose=True),
    "tensor, E5M2, margin, saturating": ResultCast(
        format=E5M2,
        granularity=PerTensor(),
        rule=ScaleRule(ScaleRounding.EVEN, AMAX_FLOOR, 2),
        nonfinite=Nonfinite.SATURATE,
        transpose=False,
    ),
    "row": ResultCast(format=E4M3, granularity=PerRow(), rule=_POWERS, transpose=True),
    "row, forward only": ResultCast(format=E4M3, granularity=PerRow(), rule=_EXACT, transpose=False),
    "128 of a row": ResultCast(format=E4M3, granularity=PerBlock(1, 128), rule=_POWERS, transpose=True),
    "32 of a row, bytes": ResultCast(
        format=E4M3,
        granularity=PerBlock(1, 32),
        rule=ScaleRule(ScaleRounding.RCEIL, 0.0, 0),
        scale_format=E8M0,
        transpose=True,
    ),
}


def cast_by_torch(
    y: Tensor, cast: ResultCast, *, amax: Tensor | None = None, scale: Tensor | None = None
) -> QuantizedTensor:
    return quantize(
        y,
        cast.format,
        granularity=cast.granularity,
        scale_rounding=cast.rule.rounding,
        scale_format=cast.scale_format,
        amax_floor=cast.rule.amax_floor,
        margin=cast.rule.margin,
        nonfinite=cast.nonfinite,
        amax=amax,
        scale=scale,
    )


def assert_operands_of(
    made: CastResult, y: Tensor, cast: ResultCast, *, amax: Tensor | None = None, scale: Tensor | None = None
) -> None:
    """Codes and scales bit for bit those of ``y`` and of its transpose; found: what the whole of it holds."""
    output, transposed = made.operands(cast, y.dtype, scale)
    known = amax if amax is not None and amax > 0 else None
    assert_same(output, cast_by_torch(y, cast, amax=known, scale=scale))
    if cast.transpose:
        assert transposed is not None
        assert_same(transposed, cast_by_torch(y.t(), cast, amax=known, scale=scale))
    else:
        assert transposed is None
    found, wanted = made.measurement(), measure(y, PerTensor())
    assert found.nonfinite == (0 if wanted.nonfinite is None else wanted.nonfinite)
    if isinstance(cast.granularity, PerTensor):
        assert found.amax == wanted.amax


def amax_of(made: CastResult, cast: ResultCast) -> Tensor | None:
    """What a cast of the same tensor is given so that it need not measure again."""
    return made.measurement().amax if isinstance(cast.granularity, PerTensor) else None


def assert_same_transpose(made: CastResult, wanted: CastResult, cast: ResultCast) -> None:
    (_, ours), (_, theirs) = (each.operands(cast, torch.bfloat16, None) for each in (made, wanted))
    assert ours is not None
    assert theirs is not None
    assert_same(ours, theirs)


def assert_same(made: QuantizedTensor, wanted: QuantizedTensor) -> None:
    assert made.data.dtype is wanted.data.dtype
    assert torch.equal(made.scale.cpu(), wanted.scale.cpu())
    ours, theirs = made.data.cpu(), wanted.data.cpu()
    assert torch.equal(ours.float().isnan(), theirs.float().isnan())
    known = ~theirs.float().isnan()
    assert torch.equal(ours.view(torch.uint8)[known], theirs.view(torch.uint8)[known])
