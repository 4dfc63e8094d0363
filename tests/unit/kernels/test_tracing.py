"""Gradients through ``autograd.Function`` in a traced graph, in every torch that octavo supports."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
from octavo.kernels import tracing, triton_bindings
from octavo.kernels.tracing import _digest, sources, unaliased


class _Doubled(torch.autograd.Function):
    """2x by operations that name its result three times; its gradient is a recognisable 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return unaliased((x * 2).to(x.dtype).contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_a_result_with_several_names_keeps_its_gradient_in_a_traced_graph() -> None:
    x = torch.randn(4, requires_grad=True)
    y = torch.compile(_Doubled.apply, backend="aot_eager", fullgraph=True)(x)
    y.backward(torch.ones(4))
    assert torch.equal(y, x * 2)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 3.0))  # torch 2.11 gave zeros


def test_outside_of_a_graph_it_is_the_result_itself() -> None:
    x = torch.randn(4)
    assert unaliased(x) is x


def _calls(function: Callable[..., object], *tensors: Tensor) -> list[fx.Node]:
    """Of octavo's operators, in what dynamo traces."""
    graphs: list[fx.Graph] = []

    def take(module: fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.extend(part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
        return module.forward

    torch.compile(function, backend=take, fullgraph=True)(*tensors)
    return [node for graph in graphs for node in graph.nodes if "octavo.cast" in str(node.target)]


@pytest.mark.long
def test_a_cast_says_whether_it_is_measured_and_of_which_sources_it_is() -> None:
    """A layer counts what is not finite; a plain cast's caller gets no measurement."""
    layer = octavo.nn.Linear(16, 8, bias=False, recipe="tensorwise")
    trained = _calls(layer, torch.ones(4, 16))
    plain = _calls(lambda x: octavo.quantize(x, octavo.E4M3).data, torch.ones(4))
    assert {node.args[-2:] for node in trained} == {(True, sources())}
    assert {node.args[-2:] for node in plain} == {(False, sources())}


def test_sources_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digest = sources()
    package = tmp_path / "octavo"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("kernels", "numerics"):
        shutil.copytree(Path(octavo.__file__).parent / name, package / name, ignore=ignored)
    shutil.copy(Path(octavo.__file__).parent / "formats.py", package)
    monkeypatch.setattr(tracing, "files", lambda _: package)
    _digest.cache_clear()
    assert sources() == digest
    for name in ("kernels/triton_bindings.py", "kernels/triton/casts.py", "numerics/granularity.py", "formats.py"):
        before, path = sources(), package / name
        path.write_text(path.read_text() + "\n")
        _digest.cache_clear()
        assert sources() != before
    _digest.cache_clear()


@pytest.mark.parametrize("exporting", [True, False])
def test_an_exported_graph_keeps_the_operator(exporting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: exporting)
    monkeypatch.setattr(triton_bindings, "cast", None)  # what it does on a GPU, which is called to be seen
    graphs: list[str] = []
    arguments: tuple[Any, ...] = (torch.float8_e4m3fn, [], "fp32", 0.0, 0, True, None, None, False, True, sources())

    def take(module: fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(str(module.graph))
        return module.forward

    def run() -> None:
        aot_function(lambda x: torch.ops.octavo.cast(x, *arguments), fw_compiler=take)(x)

    with FakeTensorMode():
        x = torch.empty(8, device="cuda")
        if not exporting:
            with pytest.raises(TypeError, match="NoneType"):
                run()
            return
        run()
    assert "octavo.cast" in graphs[0]
