"""Scales of experts that few calibration tokens reach.

A router sends an expert only some of the tokens, and a rare expert few of them or none. The amax of a few tokens is too
small a range for those that it will get when served, so such an expert's input has the largest scale of the same layer
in the other experts: they read tokens of the same distribution, and a range that is too large costs FP8 little.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from octavo.convert import UnfusedExperts
from octavo.quantization.calibration.observers import InputStatistics

__all__ = ["MIN_TOKENS", "fill_in", "same_layers", "tokens_of"]

MIN_TOKENS = 64


def same_layers(module: nn.Module, paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each of these layers of an expert, the paths of the same layer of all experts beside it."""
    known, same = set(paths), dict[str, tuple[str, ...]]()
    for path, experts in module.named_modules():
        if isinstance(experts, UnfusedExperts):
            for name in (*experts.up_names, experts.down_name):
                each = tuple(f"{path}.{expert}.{name}" for expert in range(experts.num_experts))
                same |= {one: tuple(filter(known.__contains__, each)) for one in each if one in known}
    return same


def tokens_of(inputs: Mapping[str, InputStatistics], layers: Mapping[str, nn.Linear]) -> dict[str, int]:
    """Number of tokens that each layer has received."""
    elements = {path: int(inputs[path].counts.counts.sum()) if path in inputs else 0 for path in layers}
    return {path: elements[path] // layer.in_features for path, layer in layers.items()}


def fill_in(
    scales: dict[str, Tensor], same: Mapping[str, tuple[str, ...]], tokens: Mapping[str, int], least: int
) -> frozenset[str]:
    """Give experts with fewer tokens than ``least`` the largest scale of those with enough (else of any) and their own.

    Args:
        scales: of the inputs that tokens have reached, by path; gets those of the other experts.
        same: from :func:`same_layers`.
        tokens: of each layer of an expert.
        least: number of tokens.

    Returns:
        The paths of the layers that have another's scale.
    """
    measured, borrowed = dict(scales), set[str]()
    for path in (each for each in same if tokens[each] < least):
        enough = [each for each in same[path] if tokens[each] >= least]
        lenders = [measured[each] for each in (path, *(enough or same[path])) if each in measured]
        if lenders:
            scales[path] = max(lenders, key=float).clone()
            borrowed.add(path)
    return frozenset(borrowed)
