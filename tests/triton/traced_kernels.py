"""Trace, on a machine without a GPU, the operators that ``torch.compile`` sees through, and build what it would build.

    python -m tests.triton.traced_kernels

inductor makes a module of its own of a kernel: the kernel's source and that of all it calls, found by their names.
Prints a line of JSON for every launch in an operator's graph (the operator, the kernel, the names of what it writes and
of those among them that the operator was given), one for every operator (whether memory of another dtype is viewed as
its codes), and one for every kernel that was built from inductor's copy (the kernel, whether its code for compute
capability 9.0 is that of the original).
"""

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from functorch.compile import aot_function  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as copied_source
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from octavo.formats import E4M3
from octavo.kernels.triton import codes, launching
from tests.triton.hopper_build import NoDevice, all_calls

_CODES = E4M3.torch_dtype
_GRANULARITIES: list[list[int]] = [[], [1], [1, 128], [128, 128]]  # as operators are told


def _operators() -> Iterator[tuple[str, Callable[..., object], tuple[Any, ...]]]:
    """A name, a function and its tensors; sizes are no multiples of a tile's."""
    x, gain, amax = _on_gpu(300, 500), _on_gpu(500), _on_gpu(dtype=torch.float32)
    nothing, rows = (_on_gpu(size, dtype=torch.float32) for size in (0, 300))
    cast, both_ways = torch.ops.octavo.cast, torch.ops.octavo.cast_both_ways
    for groups in _GRANULARITIES:
        for given, measured in [(None, True), (None, False)] + [(amax, True), (amax, False)] * (not groups):
            arguments = (_CODES, groups, "fp32", 1e-12, 0, True, given, None, True, measured, "")
            yield "cast", _bound(cast, arguments), (x,)
            yield "cast of a transpose", _bound(cast, arguments), (x.t(),)
            yield "cast_both_ways", _bound(both_ways, arguments), (x,)
    norm = torch.ops.octavo.norm_backward
    for layer in (True, False):
        yield "norm_backward", _bound(norm, (layer, False, layer, "")), (x, x, gain, rows if layer else nothing, rows)
    for gated in (True, False):
        grad = _on_gpu(300, 250) if gated else x
        yield "activation_backward", _bound(torch.ops.octavo.activation_backward, ("silu", gated, "")), (grad, x)


def _on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def _bound(call: Callable[..., Any], rest: tuple[Any, ...]) -> Callable[..., object]:
    def run(*tensors: Tensor) -> object:
        return call(*tensors, *rest)

    return run


def _graph(function: Callable[..., object], tensors: tuple[Tensor, ...]) -> fx.Graph:
    graphs: list[fx.Graph] = []

    def take(module: fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(module.graph)
        return module.forward

    aot_function(function, fw_compiler=take)(*tensors)
    (graph,) = graphs
    return graph


def _launches(graph: fx.Graph) -> Iterator[dict[str, Any]]:
    for node in graph.nodes:
        assert "octavo" not in str(node.target), f"{node.target} is not seen through"
        if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional:
            kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # a tuner that has one configuration
            written, tensors = node.kwargs["tensors_to_clone"], node.kwargs["kwargs"]
            given = [name for name in written if _made_of(tensors[name]).op == "placeholder"]
            yield {"kernel": kernel.fn.__name__, "written": written, "given": given}


def _views_codes(graph: fx.Graph) -> bool:
    return any(node.target is torch.ops.aten.view.dtype and node.args[1] is _CODES for node in graph.nodes)


def _made_of(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and "view" in str(node.target):
        node = node.all_input_nodes[0]
    return node


def _copy_of(kernel: JITFunction, folder: Path) -> JITFunction:
    """The kernel in a module of its own, as inductor writes one."""
    path = folder / f"{kernel.__name__}.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n@triton.jit\n{copied_source(kernel)}")
    spec = importlib.util.spec_from_file_location(kernel.__name__, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    copy: JITFunction = getattr(module, kernel.__name__)
    return copy


def _builds(seen: set[str], folder: Path) -> list[dict[str, Any]]:
    """Every kernel among ``seen`` that the calls of the other build launch, once."""
    done: set[str] = set()
    found: list[dict[str, Any]] = []

    def build_both(kernel: JITFunction, grid: Any, *arguments: Any, **constants: Any) -> None:
        name = kernel.__name__
        if name in seen - done:
            done.add(name)
            both = [
                each.run(*arguments, grid=grid, warmup=True, **constants) for each in (kernel, _copy_of(kernel, folder))
            ]
            texts = [re.sub(r"//.*", "", build.asm["ptx"]) for build in both]
            found.append({"kernel": name, "same": texts[0] == texts[1] and ".entry" in texts[0]})

    launching.launch = build_both
    for _, call in all_calls(["casts", "norms", "activations"]):
        call()
    return found


def main() -> None:
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    codes._capability = lambda device: (9, 0)  # type: ignore[assignment]
    triton.runtime.driver.set_active(NoDevice())
    seen: set[str] = set()
    with FakeTensorMode():
        for operator, function, tensors in _operators():
            graph = _graph(function, tensors)
            print(json.dumps({"operator": operator, "views_codes": _views_codes(graph)}), flush=True)
            for launch in _launches(graph):
                seen.add(launch["kernel"])
                print(json.dumps({"operator": operator} | launch), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for build in _builds(seen, Path(folder)):
            print(json.dumps(build), flush=True)


if __name__ == "__main__":
    main()
