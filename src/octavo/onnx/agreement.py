"""Comparison of a graph's torch module with the model: each layer alone, and everything between the layers.

End-to-end runs diverge wherever the last digit of FP32 moves a value across a tie between two codes, so the comparison
is local. Each layer receives its input from the model and must agree within the precision of the graph's dtype, or of
the model's if lower, determined from the outputs of its layers. Then the graph runs in lockstep with the model: the
input of each layer is compared with the model's, and its output is replaced by the model's. Errors cannot grow from one
layer to the next, and each norm, rotary angle and mask lies between two comparisons. Attention casts, which the model
does not have, are bypassed meanwhile.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.export.lockstep import relative_error
from octavo.onnx.graph import Graph
from octavo.onnx.layers import StaticCast

__all__ = ["MOST_LAYER_ERROR", "RESULT", "coarsest_dtype", "layer_errors", "lockstep_errors"]

MOST_LAYER_ERROR = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
RESULT = ""  # path of the whole model
Hook = Callable[[nn.Module, tuple[Any, ...], Any], Any]


@torch.no_grad()
def coarsest_dtype(model: nn.Module, graph: Graph, run: Callable[[], Tensor]) -> torch.dtype:
    """Least precise dtype among the graph's, the model's layers' outputs and the model's result.

    Parameters do not determine it: codes have another dtype, and ``torch.autocast`` overrides theirs.

    Args:
        model: the source model.
        graph: made from the model.
        run: calls the model and returns its result.
    """
    dtypes = {graph.dtype}

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        dtypes.add(output.dtype)

    with _hooked((model.get_submodule(path), note) for path in graph.linears):
        dtypes.add(run().dtype)
    return max((dtype for dtype in dtypes if dtype in MOST_LAYER_ERROR), key=lambda dtype: torch.finfo(dtype).eps)


@torch.no_grad()
def layer_errors(model: nn.Module, graph: Graph, run: Callable[[], Any]) -> dict[str, float]:
    """‖graph's layer - model's layer‖ / ‖model's‖ of each converted layer that was called, by path.

    Args:
        model: the source model.
        graph: made from the model.
        run: calls the model.
    """
    errors: dict[str, float] = {}

    def compare(path: str) -> Hook:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
            x = args[0].to(graph.dtype)
            expected = layer.forward(x.to(args[0].dtype))  # on the rounded input, bypassing hooks
            errors[path] = max(errors.get(path, 0.0), relative_error(graph.linears[path](x), expected))

        return hook

    with _hooked((model.get_submodule(path), compare(path)) for path in graph.linears):
        run()
    return errors


@torch.no_grad()
def lockstep_errors(
    model: nn.Module, graph: Graph, run: Callable[[], Tensor], run_graph: Callable[[], Tensor]
) -> dict[str, float]:
    """‖graph's - model's‖ / ‖model's‖ of each converted layer's input, by path, and of the result.

    Infinite if the graph does not call a layer as often as the model.

    Args:
        model: the source model.
        graph: made from the model.
        run: calls the model and returns its result.
        run_graph: calls ``graph.module`` with the same inputs.
    """
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in graph.linears}
    errors = dict.fromkeys(graph.linears, 0.0)

    def record(path: str) -> Hook:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            calls[path].append((args[0].clone(), output.clone()))  # later operations may modify them

        return hook

    def replace(path: str) -> Hook:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not calls[path]:
                errors[path] = torch.inf
                return output
            expected, replaced = calls[path].pop(0)
            errors[path] = max(errors[path], relative_error(args[0], expected))
            return replaced.to(graph.dtype)

        return hook

    with _hooked((model.get_submodule(path), record(path)) for path in graph.linears):
        model_result = run()
    casts = [each for each in graph.module.modules() if isinstance(each, StaticCast)]
    replacing = [(graph.linears[path], replace(path)) for path in graph.linears]
    with _hooked([*((cast, _bypass_cast) for cast in casts), *replacing]):
        graph_result = run_graph()
    errors |= {path: torch.inf for path, remaining in calls.items() if remaining}
    return errors | {RESULT: relative_error(graph_result, model_result)}


def _bypass_cast(_: nn.Module, args: tuple[Tensor, ...], __: Any) -> tuple[Tensor, None]:
    return args[0], None


@contextmanager
def _hooked(hooks: Iterable[tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Register a forward hook on each module, removed afterwards."""
    with ExitStack() as registered:
        for module, hook in hooks:
            registered.enter_context(module.register_forward_hook(hook))
        yield
