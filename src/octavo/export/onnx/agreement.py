"""Whether a graph's form in torch is the model: each layer by itself, and everything between the layers.

End to end two runs part wherever a last digit of FP32 moves a value across a tie between two codes. So no run is end to
end. Each layer is given what reaches it in the model, and must agree to the digits that the dtype has: the
graph's, or the model's where that has fewer, found by looking at what its layers give. Then the graph
runs in lockstep with the model: what reaches a layer is compared with what reaches it there, and the layer hands on
what the model's made. An error cannot grow from one layer to the next, and each norm, rotary angle and mask stands
between two comparisons. Attention's casts, which the model has not, let everything through meanwhile.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.export.agreement import relative_error
from octavo.export.onnx.graph import Graph
from octavo.export.onnx.layers import StaticCast

__all__ = ["MOST_LAYER_ERROR", "RESULT", "coarsest_dtype", "layer_errors", "lockstep_errors"]

MOST_LAYER_ERROR = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
RESULT = ""  # the path of the whole model
Hook = Callable[[nn.Module, tuple[Any, ...], Any], Any]


@torch.no_grad()
def coarsest_dtype(model: nn.Module, graph: Graph, run: Callable[[], Tensor]) -> torch.dtype:
    """The one with the fewest digits of the graph's dtype, those that the model's layers compute in, and its result's.

    Parameters do not say it: codes have no such dtype, and ``torch.autocast`` passes them over.

    Args:
        model: the source.
        graph: made from it.
        run: calls the model; gives its result.
    """
    seen = {graph.dtype}

    def note(_: nn.Module, __: Any, made: Tensor) -> None:
        seen.add(made.dtype)

    with _hooked((model.get_submodule(path), note) for path in graph.linears):
        seen.add(run().dtype)
    return max((dtype for dtype in seen if dtype in MOST_LAYER_ERROR), key=lambda dtype: torch.finfo(dtype).eps)


@torch.no_grad()
def layer_errors(model: nn.Module, graph: Graph, run: Callable[[], Any]) -> dict[str, float]:
    """‖graph's layer - model's layer‖ / ‖model's‖ of each layer that is an operator and was called, by path.

    Args:
        model: the source.
        graph: made from it.
        run: calls the model, whatever that takes.
    """
    errors: dict[str, float] = {}

    def compare(path: str) -> Hook:
        def hook(layer: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
            x = given[0].to(graph.dtype)
            wanted = layer.forward(x.to(given[0].dtype))  # of the rounded input, and without hooks
            errors[path] = max(errors.get(path, 0.0), relative_error(graph.linears[path](x), wanted))

        return hook

    with _hooked((model.get_submodule(path), compare(path)) for path in graph.linears):
        run()
    return errors


@torch.no_grad()
def lockstep_errors(
    model: nn.Module, graph: Graph, run: Callable[[], Tensor], run_graph: Callable[[], Tensor]
) -> dict[str, float]:
    """‖graph's - model's‖ / ‖model's‖ of what reaches each layer that is an operator, by path, and of the result.

    Infinite where the graph calls a layer more often than the model, or less.

    Args:
        model: the source.
        graph: made from it.
        run: calls the model; gives its result.
        run_graph: calls ``graph.module`` with the same.
    """
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in graph.linears}
    errors = dict.fromkeys(graph.linears, 0.0)

    def record(path: str) -> Hook:
        def hook(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
            calls[path].append((given[0].clone(), made.clone()))  # what follows may write into them

        return hook

    def replace(path: str) -> Hook:
        def hook(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
            if not calls[path]:
                errors[path] = torch.inf
                return made
            expected, replaced = calls[path].pop(0)
            errors[path] = max(errors[path], relative_error(given[0], expected))
            return replaced.to(graph.dtype)

        return hook

    with _hooked((model.get_submodule(path), record(path)) for path in graph.linears):
        wanted = run()
    casts = [each for each in graph.module.modules() if isinstance(each, StaticCast)]
    replacing = [(graph.linears[path], replace(path)) for path in graph.linears]
    with _hooked([*((cast, _let_through) for cast in casts), *replacing]):
        found = run_graph()
    errors |= {path: torch.inf for path, left in calls.items() if left}
    return errors | {RESULT: relative_error(found, wanted)}


def _let_through(_: nn.Module, given: tuple[Tensor, ...], __: Any) -> tuple[Tensor, None]:
    return given[0], None


@contextmanager
def _hooked(hooks: Iterable[tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Inside, each module's hook is called after it."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
