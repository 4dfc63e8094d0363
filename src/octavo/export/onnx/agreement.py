"""Whether a graph's form in torch is the model: each layer by itself, on what it is given in the model.

End to end two runs part wherever a last digit of FP32 moves a value across a tie between two codes; layer by layer they
must agree to the digits that the dtype has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.export.agreement import relative_error
from octavo.export.onnx.graph import Graph

__all__ = ["MOST_LAYER_ERROR", "layer_errors"]

MOST_LAYER_ERROR = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@torch.no_grad()
def layer_errors(model: nn.Module, graph: Graph, run: Callable[[], Any]) -> dict[str, float]:
    """‖graph's layer - model's layer‖ / ‖model's‖ of each layer that is an operator, by path; 0 where none was called.

    Args:
        model: the source.
        graph: made from it.
        run: calls the model, whatever that takes.
    """
    errors = dict.fromkeys(graph.linears, 0.0)

    def compare(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
            x = given[0].to(graph.dtype)
            wanted = layer.forward(x.to(given[0].dtype))  # of the rounded input, and without hooks
            errors[path] = max(errors[path], relative_error(graph.linears[path](x), wanted))

        return hook

    handles = [model.get_submodule(path).register_forward_hook(compare(path)) for path in graph.linears]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return errors
