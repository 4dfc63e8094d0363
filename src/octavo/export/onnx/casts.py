"""Which QuantizeLinear of a graph is which cast of its form in torch.

A graph has its casts in the order in which torch makes them, but it makes no cast twice: the exporter's optimiser
merges nodes that compute the same (common subexpressions), so q, k and v of one input share a cast, also where each of
them reaches that input by operations of its own. What is merged, only the graph knows; what it may merge, torch shows:
casts of equal tensors by equal scales. So torch's casts are walked along the graph's. One that repeats an earlier cast
is that cast's node, unless the graph's next node repeats it as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.errors import CheckpointError
from octavo.export.onnx.layers import DynamicCast, StaticCast
from octavo.formats import E4M3
from octavo.numerics.cast import cast_nearest

__all__ = ["GivenCodes", "MadeCast", "nodes_of", "noted_casts"]


@dataclass(frozen=True, slots=True)
class MadeCast:
    """What one cast was made of.

    Attributes:
        x: the tensor.
        encode_scale: float32.
    """

    x: Tensor
    encode_scale: Tensor

    def repeats(self, other: "MadeCast") -> bool:
        """Whether both make the same codes of the same tensor."""
        return torch.equal(self.x, other.x) and torch.equal(self.encode_scale, other.encode_scale)


@contextmanager
def noted_casts(module: nn.Module) -> Iterator[list[tuple[DynamicCast | StaticCast, MadeCast]]]:
    """Inside, every cast that the module makes is listed, in order, with the tensor as it then was."""
    casts: list[tuple[DynamicCast | StaticCast, MadeCast]] = []

    def note(cast: Any, given: tuple[Tensor, ...], _: Any) -> None:
        casts.append((cast, MadeCast(given[0].clone(), cast.encode(given[0]))))  # what follows may write into it

    hooked = [each for each in module.modules() if isinstance(each, DynamicCast | StaticCast)]
    handles = [each.register_forward_hook(note) for each in hooked]
    try:
        yield casts
    finally:
        for handle in handles:
            handle.remove()


def nodes_of(casts: Sequence[MadeCast], nodes: Sequence[MadeCast]) -> list[int]:
    """The index of the node that each of torch's casts is.

    Args:
        casts: of torch, in order.
        nodes: of the graph, in order.

    Raises:
        CheckpointError: the graph has casts that torch has not, or lacks some.

    Example:
        >>> one, two = (MadeCast(torch.full((2,), x), torch.ones(())) for x in (1.0, 2.0))
        >>> nodes_of([one, one, two], [one, two])  # the graph has merged two casts
        [0, 0, 1]
        >>> nodes_of([one, one, two], [one, one, two])  # and here it has not
        [0, 1, 2]
    """
    found: list[int] = []
    reached = 0
    for place, cast in enumerate(casts):
        before = next((node for node, other in zip(found, casts, strict=False) if other.repeats(cast)), None)
        if before is not None and not (reached < len(nodes) and nodes[reached].repeats(nodes[before])):
            found.append(before)
        elif reached < len(nodes):
            found.append(reached)
            reached += 1
        else:
            raise _miscounted(casts[: place + 1], nodes)
    if reached < len(nodes):
        raise _miscounted(casts, nodes)
    return found


def _miscounted(casts: Sequence[MadeCast], nodes: Sequence[MadeCast]) -> CheckpointError:
    different = sum(not any(cast.repeats(other) for other in casts[:place]) for place, cast in enumerate(casts))
    return CheckpointError(f"the graph has {len(nodes)} casts to FP8, the model {different} different ones")


class GivenCodes(TorchDispatchMode):
    """Inside, casts give these codes, one after the other."""

    def __init__(self, codes: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.remaining = iter(codes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.octavo.graph_quantize.default:
            return func(*args, **(kwargs or {}))
        return cast_nearest(next(self.remaining), E4M3)  # they are E4M3's values already
