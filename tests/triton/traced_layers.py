"""Run, on a machine without a GPU, what ``torch.compile`` makes of octavo's layers for one: its kernels, interpreted.

    python -m tests.triton.traced_layers

Layers on a CPU are traced as if it were a GPU. Then their graphs run, forward and backward, each of their launches by
Triton's interpreter and each product by the CPU's own kernel, and every result is compared with that of the same layer
uncompiled, which the CPU's kernels compute. Prints a line of JSON for every step of a layer: the layer, the recipe, the
kernels that its graphs launched, and how far each result is from the uncompiled layer's, relative to its norm.
"""

import copy
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import octavo
import octavo.kernels.triton
from octavo.formats import E4M3, E5M2
from octavo.functional import linear as functional
from octavo.kernels import fused_casts, triton_bindings
from octavo.kernels.backend import CastProblem
from octavo.kernels.triton import codes
from octavo.nn import LayerNormLinear, LayerNormMLP, Linear
from tests.interpreter import prepare_interpreter
from tests.recorded_state import recorded_state
from tests.triton.hopper_build import NoDevice

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **options: Linear(100, 72, **options),
    "norm and linear": lambda **options: LayerNormLinear(100, 72, **options),
    "norm and MLP": lambda **options: LayerNormMLP(100, 72, activation="swiglu", normalization="rmsnorm", **options),
}
RECIPES = {
    "linear": [name for name in octavo.recipes.names() if octavo.recipes.get(name).output.a is not None],
    "norm and linear": ["delayed", "rowwise"],
    "norm and MLP": ["delayed", "blockwise"],
}
STEPS = 3
Results = dict[str, Tensor]

launched: list[str] = []


def _layer(kind: str, recipe: str) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[kind](recipe=recipe, manual_scale_updates=octavo.recipes.get(recipe).is_delayed)
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(layer, {"input.scale": torch.tensor(2.0**-6)})
    return layer if kind == "norm and MLP" else layer.bfloat16()  # where layers round and a fused backward does not


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and what multiplies the outputs' sum; rows and columns are no multiples of a tile's."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(3, 15, 100, generator=generator) * 2.0**step
        if step == 1:
            x[0, 0, 0], x[1, 2, 3] = float("inf"), float("nan")
        yield x, torch.randn(3, 15, 100, generator=generator) / 64


def _step(layer: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor, up: Tensor) -> Results:
    owner.zero_grad()
    x = x.to(next(owner.parameters()).dtype).requires_grad_()
    y = layer(x)
    y.backward(up[..., : y.shape[-1]].to(y.dtype))
    octavo.update_scales(owner)
    assert x.grad is not None
    found = {"output": y.detach(), "input's gradient": x.grad}
    found |= {f"{name}'s gradient": p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None}
    return found | {f"state: {name}": value.clone() for name, value in recorded_state(owner).items()}


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, of what is finite; infinite where what is not differs."""
    finite = wanted.isfinite()
    if found.shape != wanted.shape or not torch.equal(finite, found.isfinite()):
        return float("inf")
    if not torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num()):
        return float("inf")
    difference = (found[finite].double() - wanted[finite].double()).norm()
    return (difference / wanted[finite].double().norm()).item() if difference else 0.0


class _Run(fx.Interpreter):
    """A graph whose launches Triton's interpreter runs."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.higher_order.triton_kernel_wrapper_functional:
            return super().call_function(target, args, kwargs)
        tuner: Any = kernel_side_table.get_kernel(kwargs["kernel_idx"])  # it has one configuration
        constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
        own = {name: kwargs["kwargs"][name].clone() for name in kwargs["tensors_to_clone"]}
        kernel = InterpretedFunction(tuner.fn.fn)
        (grid,) = kwargs["grid"]
        kernel[grid](**(kwargs["kwargs"] | own), **constants, **tuner.configs[0].all_kwargs())
        launched.append(tuner.fn.__name__)
        return own


def _runner(module: fx.GraphModule, _: object) -> Callable[..., object]:
    """While graphs are made, whoever calls one gets zeros: an interpreted kernel leaves Triton's language changed."""
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]

    def run(*arguments: Any) -> object:
        if triton.knobs.runtime.interpret:
            return _Run(module).run(*arguments)
        return [_zeros(node.meta["val"]) if isinstance(node, fx.Node) else node for node in results]

    return make_boxed_func(run)


def _zeros(like: Any) -> Any:
    if not isinstance(like, Tensor):
        return like
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()


def _modules() -> list[Any]:
    own = octavo.kernels.triton
    names = [f"{own.__name__}.{module.name}" for module in pkgutil.iter_modules(own.__path__)]
    language = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    return [importlib.import_module(name) for name in names] + language + [tl.tensor]


def _interpret() -> None:
    """What TRITON_INTERPRET=1 would have made of every function of Triton's had it been set from the beginning."""
    triton.knobs.runtime.interpret = True
    prepare_interpreter()
    for module in _modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))
            if name == "_INTERPRETED":
                setattr(module, name, tl.constexpr(True))


def _unsupported_reason(problem: CastProblem) -> str | None:
    able = problem.format in (E4M3, E5M2) and triton_bindings._fits(problem.granularity)
    return None if able else "neither can the GPU's kernels"


def _take_the_cpu_for_a_gpu() -> None:
    """One whose kernels cast by integers, which is what the interpreter can do."""
    codes._capability = lambda device: (8, 0)  # type: ignore[assignment]
    triton.runtime.driver.set_active(NoDevice())
    Tensor.is_cuda = property(lambda x: True)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: -1  # what a tensor on the CPU says of its device
    triton_bindings.unsupported_reason = _unsupported_reason
    triton_bindings.closes_steps = lambda window: False
    vars(functional)["recasts_weight"] = lambda *_: True
    fused_casts.DEVICES = ("cpu",)


def _analyze_each_kernel_once() -> None:
    """What a kernel reads and writes, torch compiles it for at every launch; the same arguments give the same."""
    analyze, known = triton_kernel_wrap.identify_accessed_tensors, {}

    def remembered(kernel: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        described = (
            (name, value.dtype if isinstance(value, Tensor) else repr(value)) for name, value in kwargs.items()
        )
        key = (id(kernel.fn), *described, repr(rest))
        if key not in known:
            known[key] = analyze(kernel, kwargs, *rest)
        return known[key]

    triton_kernel_wrap.identify_accessed_tensors = remembered  # type: ignore[assignment]


def _trace(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer compiled; what its state was it is again."""
    backend = aot_autograd(
        fw_compiler=_runner,
        bw_compiler=_runner,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    before = copy.deepcopy(layer.state_dict())
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    _step(compiled, layer, *next(_batches()))
    layer.load_state_dict(before)
    return compiled


def main() -> None:
    cases = [(kind, recipe) for kind, recipes in RECIPES.items() for recipe in recipes]
    layers = [_layer(*case) for case in cases]
    uncompiled = copy.deepcopy(layers)
    wanted = [[_step(layer, layer, *batch) for batch in _batches()] for layer in uncompiled]
    _take_the_cpu_for_a_gpu()
    _analyze_each_kernel_once()
    torch._dynamo.config.recompile_limit = len(cases)  # they share a forward
    compiled = [_trace(layer) for layer in layers]
    _interpret()
    for (kind, recipe), run, layer, expected in zip(cases, compiled, layers, wanted, strict=True):
        for batch, results in zip(_batches(), expected, strict=True):
            launched.clear()
            found = _step(run, layer, *batch)
            assert found.keys() == results.keys()
            distances = {name: _distance(value, results[name]) for name, value in found.items()}
            line = {"layer": kind, "recipe": recipe, "launched": launched, "distances": distances}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
