"""Matching of a graph's QuantizeLinear nodes with the casts of its torch module.

A graph has its casts in the order in which torch executes them, but without duplicates: the exporter's optimiser merges
common subexpressions, so q, k and v of one input share a cast. The graph does not record which casts were merged;
candidates are casts of equal tensors with equal scales. The casts of torch are therefore matched in order. A cast that
repeats an earlier one maps to that one's node, unless the graph's next node repeats it too.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.errors import CheckpointError
from octavo.formats import E4M3
from octavo.numerics.cast import cast_nearest
from octavo.onnx.layers import DynamicCast, StaticCast

__all__ = ["RecordedCast", "ReplayCodes", "match_nodes", "record_casts"]


@dataclass(frozen=True, slots=True)
class RecordedCast:
    """Operands of one cast.

    Attributes:
        x: the tensor.
        encode_scale: float32.
    """

    x: Tensor
    encode_scale: Tensor

    def repeats(self, other: "RecordedCast") -> bool:
        """Report whether both cast the same tensor with the same scale."""
        return torch.equal(self.x, other.x) and torch.equal(self.encode_scale, other.encode_scale)


@contextmanager
def record_casts(module: nn.Module) -> Iterator[list[tuple[DynamicCast | StaticCast, RecordedCast]]]:
    """Context manager that records every cast of the module, in order, with a copy of its tensor."""
    casts: list[tuple[DynamicCast | StaticCast, RecordedCast]] = []

    def note(cast: Any, args: tuple[Tensor, ...], _: Any) -> None:
        casts.append((cast, RecordedCast(args[0].clone(), cast.encode(args[0]))))  # later operations may modify it

    with ExitStack() as hooks:
        for each in module.modules():
            if isinstance(each, DynamicCast | StaticCast):
                hooks.enter_context(each.register_forward_hook(note))
        yield casts


def match_nodes(casts: Sequence[RecordedCast], nodes: Sequence[RecordedCast]) -> list[int]:
    """Index of the node for each of torch's casts.

    Args:
        casts: of torch, in order.
        nodes: of the graph, in order.

    Raises:
        CheckpointError: the graph has additional casts, or lacks some.

    Example:
        >>> one, two = (RecordedCast(torch.full((2,), x), torch.ones(())) for x in (1.0, 2.0))
        >>> match_nodes([one, one, two], [one, two])  # the graph has merged two casts
        [0, 0, 1]
        >>> match_nodes([one, one, two], [one, one, two])  # the graph has not merged them
        [0, 1, 2]
    """
    matches: list[int] = []
    next_node = 0
    for index, cast in enumerate(casts):
        earlier = next((node for node, other in zip(matches, casts, strict=False) if other.repeats(cast)), None)
        if earlier is not None and not (next_node < len(nodes) and nodes[next_node].repeats(nodes[earlier])):
            matches.append(earlier)
        elif next_node < len(nodes):
            matches.append(next_node)
            next_node += 1
        else:
            raise _count_error(casts[: index + 1], nodes)
    if next_node < len(nodes):
        raise _count_error(casts, nodes)
    return matches


def _count_error(casts: Sequence[RecordedCast], nodes: Sequence[RecordedCast]) -> CheckpointError:
    different = sum(not any(cast.repeats(other) for other in casts[:place]) for place, cast in enumerate(casts))
    return CheckpointError(f"the graph has {len(nodes)} casts to FP8, the model {different} distinct ones")


class ReplayCodes(TorchDispatchMode):
    """Dispatch mode under which casts return the given codes, in order."""

    def __init__(self, codes: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.remaining = iter(codes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.octavo.graph_quantize.default:
            return func(*args, **(kwargs or {}))
        return cast_nearest(next(self.remaining), E4M3)  # exact: they are E4M3 values
