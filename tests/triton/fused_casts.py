"""The casts that fused kernels make, by name, and what a result must become under them."""

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, E8M0
from octavo.kernels.result_cast import ResultBuffers, ResultCast
from octavo.numerics import (
    CastSpec,
    Nonfinite,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    ScaleRounding,
    measure,
    quantize,
)

CASTS = {
    "tensor": ResultCast(spec=CastSpec(format=E4M3), transpose=True),
    "tensor, E5M2, margin, saturating": ResultCast(
        spec=CastSpec(format=E5M2, scale_rounding=ScaleRounding.EVEN, margin=2, nonfinite=Nonfinite.SATURATE),
        transpose=False,
    ),
    "row": ResultCast(
        spec=CastSpec(format=E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL), transpose=True
    ),
    "row, forward only": ResultCast(spec=CastSpec(format=E4M3, granularity=PerRow()), transpose=False),
    "128 of a row": ResultCast(
        spec=CastSpec(format=E4M3, granularity=PerBlock(1, 128), scale_rounding=ScaleRounding.RCEIL), transpose=True
    ),
    "32 of a row, bytes": ResultCast(
        spec=CastSpec(format=E4M3, granularity=PerBlock(1, 32), scale_rounding=ScaleRounding.RCEIL, scale_format=E8M0),
        transpose=True,
    ),
}


def cast_by_torch(
    y: Tensor, cast: ResultCast, *, amax: Tensor | None = None, scale: Tensor | None = None
) -> QuantizedTensor:
    spec = cast.spec
    return quantize(
        y,
        spec.format,
        granularity=spec.granularity,
        scale_rounding=spec.scale_rounding,
        scale_format=spec.scale_format,
        amax_floor=spec.amax_floor,
        margin=spec.margin,
        nonfinite=spec.nonfinite,
        amax=amax,
        scale=scale,
    )


def assert_operands_of(
    made: ResultBuffers, y: Tensor, cast: ResultCast, *, amax: Tensor | None = None, scale: Tensor | None = None
) -> None:
    """Codes and scales bit for bit those of ``y`` and of its transpose; found: what the whole of it holds.

    ``scale`` is the one that the kernel was given, on its device; ``y`` and ``amax`` are on the CPU.
    """
    output, transposed, found, *_ = made.result(cast, y.dtype, scale)
    if scale is not None:
        scale = scale.cpu()
    known = amax if amax is not None and amax > 0 else None
    assert_same(output, cast_by_torch(y, cast, amax=known, scale=scale))
    if cast.transpose:
        assert transposed is not None
        assert_same(transposed, cast_by_torch(y.t(), cast, amax=known, scale=scale))
    else:
        assert transposed is None
    wanted = measure(y, PerTensor())
    assert found is not None
    assert found.nonfinite == (0 if wanted.nonfinite is None else wanted.nonfinite)
    if isinstance(cast.spec.granularity, PerTensor):
        assert found.amax == wanted.amax


def amax_of(made: ResultBuffers, cast: ResultCast) -> Tensor | None:
    """What a cast of the same tensor is given so that it need not measure again."""
    if not isinstance(cast.spec.granularity, PerTensor):
        return None
    measurement = made.result(cast, torch.bfloat16, None).measurement
    assert measurement is not None
    return measurement.amax


def assert_same_transpose(made: ResultBuffers, wanted: ResultBuffers, cast: ResultCast) -> None:
    ours, theirs = (each.result(cast, torch.bfloat16, None).transposed for each in (made, wanted))
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
