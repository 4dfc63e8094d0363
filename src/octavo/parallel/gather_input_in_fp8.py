"""Sequence parallelism whose gathers send FP8 codes: ``gather_input_in_fp8(ColwiseParallel(…))``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ColwiseParallel

__all__ = ["gather_input_in_fp8"]


def gather_input_in_fp8(style: "ColwiseParallel") -> "ColwiseParallel":
    """Let octavo's layer gather the input that a style would gather: as codes and scales where its recipe casts it.

    Codes, scales, results and gradients are bit for bit those of the gather in high precision. Values are gathered
    where a GEMM or the doctor needs them, and where ranks' rows cut a block. Layers that are given one DTensor share a
    gather, except with a delayed or static recipe, whose scale is each layer's own.

    Args:
        style: of a converted layer; its ``input_layouts`` say which dimension the ranks divide.

    Returns:
        The same style, changed.

    docs/how-to/train-with-tensor-parallelism.md has an example.
    """
    style.desired_input_layouts = style.input_layouts  # type: ignore[assignment] # torch infers Replicate
    return style
