"""Every recipe under what training loops do: compile, checkpoint, accumulate, train in threads."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import BackendError
from octavo.kernels.dispatch import BACKENDS
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor
from octavo.recipes import GemmSpec

pytestmark = pytest.mark.long

RECIPES = tuple(octavo.recipes.names())
FP8_RECIPES = [recipe for recipe in RECIPES if recipe != "bf16"]
INPUT_SCALE = 2.0**-6  # of a static recipe: saturates at 7


def _linear(in_features: int, out_features: int, recipe: str = "tensorwise", **options: Any) -> Linear:
    layer = Linear(in_features, out_features, recipe=recipe, **options)
    if layer.recipe.has_static_input:
        layer.input_scale.fill_(INPUT_SCALE)
    return layer


@torch.library.custom_op("octavo_tests::seen", mutates_args=())
def _seen(codes: Tensor, scale: Tensor) -> Tensor:
    """What a compiled graph cannot look through or leave out: notes the codes and hands the scale on."""
    _noted.append((tuple(codes.shape), codes.contiguous().numpy().tobytes(), scale.numpy().tobytes()))
    return scale.clone()


@_seen.register_fake
def _(_codes: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(scale)


_noted: list[tuple[tuple[int, ...], bytes, bytes]] = []


def _noting(operand: QuantizedTensor) -> QuantizedTensor:
    scale = operand.scale.view(torch.uint8) if operand.scale.itemsize == 1 else operand.scale
    scale = _seen(operand.data.view(torch.uint8), scale).view(operand.scale.dtype)
    return QuantizedTensor(operand.data, scale, operand.granularity, operand.hp_dtype)


@contextmanager
def operands_seen() -> Iterator[list[tuple[tuple[int, ...], bytes, bytes]]]:
    """Codes and scales of every operand that meets another inside the block, eager or compiled in it.

    A compiler may note two equal ones once.
    """
    found: list[tuple[tuple[int, ...], bytes, bytes]] = []
    _noted.clear()
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(backend) for backend in BACKENDS}:
            original = kind.scaled_mm
            patch.setattr(
                kind,
                "scaled_mm",
                lambda self, a, b, *rest, original=original: original(self, _noting(a), _noting(b), *rest),
            )
        yield found
    torch.compiler.reset()
    found.extend(_noted)


class Parallel(nn.Module):
    """One layer a recipe, side by side, so that one compilation covers them all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({recipe: _linear(32, 16, recipe) for recipe in RECIPES})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {recipe: layer(x) for recipe, layer in self.layers.items()}


def _steps(model: nn.Module, count: int) -> list[dict[str, Tensor]]:
    """Outputs and gradients of some training steps, by recipe."""
    generator = torch.Generator().manual_seed(5)
    recorded = []
    for step in range(count):
        x = (torch.randn(8, 32, generator=generator) * 2**step).requires_grad_()
        outputs = model(x)
        grads = {recipe: torch.randn(8, 16, generator=generator) * 3**step for recipe in outputs}
        torch.autograd.backward(list(outputs.values()), list(grads.values()))
        found = {f"{recipe} output": y.detach() for recipe, y in outputs.items()}
        found |= {f"{name} grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert x.grad is not None
        recorded.append(found | {"x grad": x.grad})
        model.zero_grad()
    return recorded


def test_compiled_without_graph_breaks_it_computes_the_same_and_counts():
    """Bit-equal codes and scales; the GEMMs' epilogue may be fused, so outputs agree to float32 rounding.

    The same graphs count elements that are not finite: of an input that holds nothing else, and before it none.
    """
    eager = Parallel()
    compiled = Parallel()
    compiled.load_state_dict(eager.state_dict())
    with operands_seen() as expected_operands:
        expected = _steps(eager, 3)
    with operands_seen() as operands:
        model: Any = torch.compile(compiled, fullgraph=True)
        actual = _steps(model, 3)
        same, noted = copy.deepcopy(octavo.scaling_state(compiled)), len(_noted)
        assert octavo.nonfinite_counts(compiled) == {}
        model(torch.full((8, 32), float("inf"), requires_grad=True))
        del _noted[noted:]
    assert octavo.nonfinite_counts(compiled) == {
        f"layers.{recipe}.input": 256 for recipe in FP8_RECIPES if octavo.recipes.get(recipe).output.a is not None
    }
    for step, wanted in zip(actual, expected, strict=True):
        found = {key.replace("_orig_mod.", ""): value for key, value in step.items()}
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5 * value.abs().max().item(), msg=key)
    assert set(operands) == set(expected_operands)
    assert len(expected_operands) == 3 * 2 * sum(len(_products(recipe)) for recipe in RECIPES)
    state = octavo.scaling_state(eager)
    assert state
    assert all(torch.equal(state[key], same[key]) for key in state), "the histories differ"


def _products(recipe: str) -> list[GemmSpec]:
    """The products that take codes."""
    known = octavo.recipes.get(recipe)
    return [gemm for gemm in (known.output, known.grad_input, known.grad_weight) if gemm.a is not None]


def test_compiled_steps_end_with_their_autocast_block():
    """Not with each backward pass in it, and without a graph for every block: its number is read at run time."""
    eager = Linear(32, 16, recipe="delayed_te")
    plain = copy.deepcopy(eager)
    seen = []
    for layer, compile_it in ((eager, False), (plain, True)):
        generator = torch.Generator().manual_seed(3)
        with operands_seen() as operands:
            model = torch.compile(layer, fullgraph=True) if compile_it else layer
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            for step in range(3):
                with octavo.autocast():
                    for micro in range(2):
                        x = torch.randn(4, 32, generator=generator) * 3.0 ** (step + micro)
                        with octavo.autocast():
                            model(x.requires_grad_()).square().sum().backward()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
            assert graphs == compile_it
        seen.append((operands, octavo.scaling_state(layer)))
    (operands, state), (same_operands, same) = seen
    assert set(operands) == set(same_operands)
    assert len(operands) == 3 * 2 * 6
    assert state["input.steps"].item() == 3
    assert all(torch.equal(state[key], same[key]) for key in state)


def test_a_block_inside_of_a_graph_is_one_too():
    layer = Linear(32, 16, recipe="delayed_te")
    twin = copy.deepcopy(layer)

    def in_blocks(model: Linear, x: Tensor) -> Tensor:
        with octavo.autocast():
            y = model(x)
        with octavo.autocast():
            return y + model(2 * x)

    compiled = torch.compile(in_blocks, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(4, 32)
        for model, function in ((layer, in_blocks), (twin, compiled)):
            function(model, x).sum().backward()
    state, same = octavo.scaling_state(layer), octavo.scaling_state(twin)
    assert state["input.steps"].item() == 4
    assert all(torch.equal(state[key], same[key]) for key in state)


def _chain(recipe: str) -> nn.Sequential:
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
    octavo.convert(model, recipe)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.recipe.has_static_input:
            layer.input_scale.fill_(INPUT_SCALE)
    return model


def _checkpointed(model: nn.Sequential, x: Tensor, use_reentrant: bool | None) -> Tensor:
    for block in model:
        x = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
    return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_changes_no_bit(recipe, use_reentrant):
    plain, saved = _chain(recipe), _chain(recipe)
    for step in range(3):
        batch = torch.randn(4, 16) * 2**step
        for model, mode in ((plain, None), (saved, use_reentrant)):
            _checkpointed(model, batch.clone().requires_grad_(), mode).square().sum().backward()
    for one, other in zip(plain.parameters(), saved.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    state, same = octavo.scaling_state(plain), octavo.scaling_state(saved)
    assert all(torch.equal(state[key], same[key]) for key in state)


@pytest.mark.parametrize("backward", ["inside", "outside", "on another thread"])
@pytest.mark.parametrize("override", ["rowwise", "bf16", "delayed"])
def test_checkpointing_repeats_the_recipe_of_the_first_time(override, backward):
    layer, x = Linear(16, 8, recipe="tensorwise"), torch.randn(4, 16, requires_grad=True)
    with octavo.autocast(override):
        layer(x).sum().backward()
    expected = layer.weight.grad
    assert expected is not None
    layer.zero_grad()
    with octavo.autocast(override):
        loss = checkpoint(layer, x, use_reentrant=False).sum()
        if backward == "inside":
            loss.backward()
        if backward == "on another thread":  # as autograd's own for an accelerator
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
    if backward == "outside":
        loss.backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_accumulate(recipe):
    """The sum of micro-batches' gradients is what the parameter holds after them."""
    model = _linear(16, 8, recipe, manual_scale_updates=octavo.recipes.get(recipe).is_delayed)
    batches = [torch.randn(4, 16) for _ in range(3)]
    alone = []
    for batch in batches:
        model.zero_grad()
        model(batch).square().sum().backward()
        assert model.weight.grad is not None
        alone.append(model.weight.grad.clone())
    model.zero_grad()
    for batch in batches:
        model(batch).square().sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, alone[0] + alone[1] + alone[2])


@pytest.mark.parametrize("recipe", RECIPES)
def test_threads_train_as_if_alone(recipe):
    def train(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        model = _linear(32, 32, "static" if octavo.recipes.get(recipe).has_static_input else "tensorwise")
        nn.init.normal_(model.weight, generator=generator)
        nn.init.zeros_(model.bias)
        with octavo.autocast(recipe):
            for _ in range(5):
                model(torch.randn(8, 32, generator=generator)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    results: dict[int, list[Tensor]] = {}
    threads = [threading.Thread(target=lambda s=seed: results.update({s: train(s)})) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert all(torch.equal(one, other) for one, other in zip(results[seed], train(seed), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_functional_call_takes_other_weights(recipe):
    layer, x = _linear(16, 8, recipe).eval(), torch.randn(4, 16)
    other = {"weight": torch.randn(8, 16), "bias": torch.zeros(8)}
    result = torch.func.functional_call(layer, other, (x,))
    layer.load_state_dict(other)
    assert torch.equal(result, layer(x))


def _broken_step(layer: nn.Module, *, checkpointed: bool | None = None) -> None:
    x, grad = torch.randn(4, 16), torch.randn(4, 8)
    x[0, 0], x[1, 2], grad[3, 3] = float("nan"), float("inf"), float("-inf")
    x.requires_grad_()
    y = layer(x) if checkpointed is None else checkpoint(layer, x, use_reentrant=checkpointed)
    y.backward(grad)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_non_finite_elements_are_counted_once_a_call(recipe):
    layer = _linear(16, 8, recipe)
    gemms = octavo.recipes.get(recipe)
    counted = {"input": 2} if gemms.output.a is not None else {}
    counted |= {"grad_output": 1} if gemms.grad_input.a is not None else {}
    for calls, checkpointed in enumerate((None, False, True), start=1):
        _broken_step(layer, checkpointed=checkpointed)
        assert octavo.nonfinite_counts(layer) == {role: count * calls for role, count in counted.items()}
    layer.eval()
    layer(torch.full((1, 16), float("nan")))
    assert octavo.nonfinite_counts(layer).get("input", 0) == counted.get("input", 0) * 3, "evaluation counts nothing"
    with torch.no_grad():
        layer.train().weight[0, 0] = float("inf")
    layer(torch.ones(1, 16))
    assert octavo.nonfinite_counts(layer)["weight"] == 1


def test_compiled_with_dynamic_shapes_layers_may_share_a_recipe():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    octavo.convert(model, "tensorwise")
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_compiled_with_dynamic_shapes_a_layer_may_be_called_twice(recipe):
    layer = _linear(32, 32, recipe)

    def twice(x):
        return layer(layer(x))

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), twice(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["delayed", "delayed_te"])
def test_compiled_with_dynamic_shapes_delayed_layers_train(recipe):
    eager = nn.Sequential(_linear(32, 16, recipe), _linear(16, 32, recipe))
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, dynamic=True)
    for rows in (3, 16, 5):
        x = torch.randn(rows, 32)
        for model in (eager, compiled):
            model(x).square().sum().backward()
        octavo.update_scales(eager)
        octavo.update_scales(traced)
    for one, other in zip(traced.parameters(), eager.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5 * other.grad.abs().max().item())
    state, same = octavo.scaling_state(eager), octavo.scaling_state(traced)
    assert state.keys() == same.keys()
    for key, value in state.items():
        torch.testing.assert_close(same[key], value, rtol=1e-5, atol=0, msg=key)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "rowwise_hp_grad_weight"])
def test_exported_model_accepts_any_row_count_within_its_dynamic_range(recipe, dtype):
    """Saved tensors depend on the number of rows, 2 to 512; an exported graph decides for all of them."""
    model = nn.Sequential(_linear(64, 128, recipe), _linear(128, 64, recipe)).to(dtype)
    rows = torch.export.Dim("rows", min=2, max=512)
    exported = torch.export.export(model, (torch.randn(8, 64, dtype=dtype),), dynamic_shapes={"input": {0: rows}})
    for count in (2, 300):
        assert exported.module()(torch.randn(count, 64, dtype=dtype)).shape == (count, 64)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_recorded_by_make_fx_it_takes_any_number_of_rows(recipe):
    """Where no compiler says so, sizes are symbols all the same."""
    layer = Linear(64, 64, bias=False, recipe=recipe)

    def step(x: Tensor, weight: Tensor) -> list[Tensor]:
        y = nn.functional.silu(torch.func.functional_call(layer, {"weight": weight}, (x,)))
        return [y, *torch.autograd.grad(y.square().sum(), [x, weight])]

    def of(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 64, requires_grad=True), layer.weight.detach().clone().requires_grad_()

    recorded = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*of(32))
    for rows in (32, 96, 256):
        operands = of(rows)
        assert all(map(torch.equal, recorded(*operands), step(*operands)))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
def test_exported_and_compiled_ahead_of_time_it_computes_the_same(tmp_path):
    """AOTInductor, all recipes in one package: it hands a scale a tensor's block, [], over as None."""
    model, x = Parallel().eval(), torch.randn(16, 32)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for rows in (16, 5):
        x = torch.randn(rows, 32)
        found, wanted = loaded(x), model(x)
        assert found.keys() == wanted.keys()
        for recipe, y in wanted.items():
            torch.testing.assert_close(found[recipe], y, rtol=1e-5, atol=1e-5 * y.abs().max().item(), msg=recipe)


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please switch:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "bf16"])
def test_jit_trace_is_refused_with_an_alternative(recipe, training):
    """TensorBoard's add_graph traces so; in high precision it can, and torch.export can."""
    model, x = nn.Sequential(_linear(32, 16, recipe)).train(training), torch.randn(4, 32)
    with pytest.raises(BackendError, match=r"record the model with torch\.export\.export, or inside octavo\.autocast"):
        torch.jit.trace(model, (x,))
    with octavo.autocast(enabled=False):
        traced = torch.jit.trace(model, (x,))
        assert torch.equal(traced(x), model(x))
    assert torch.equal(torch.export.export(model.eval(), (x,)).module()(x), model(x))


def test_jit_script_is_refused_with_an_alternative():
    model = nn.Sequential(nn.Linear(8, 8))
    octavo.convert(model)
    with pytest.raises(BackendError, match=r"torch.jit.script .* torch.export.export"):
        torch.jit.script(model)
    octavo.restore(model)
    assert torch.jit.script(model)(torch.ones(1, 8)).shape == (1, 8)


class NormThenTwoLinears(nn.Module):
    """An operand of each linear that the compiler would like to keep in FP32 under bf16 autocast."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.norm = octavo.nn.RMSNorm(32)
        self.first = Linear(32, 64, bias=False, recipe=recipe)
        self.second = Linear(64, 32, bias=False, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.norm(x))
        return self.second(nn.functional.silu(hidden) * hidden)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@inductor_config.patch(emulate_precision_casts=True)
def test_compiled_under_bf16_autocast_with_roundings_kept_it_computes_the_same(recipe):
    """Inductor leaves out roundings of intermediates to BF16 unless it is told to keep them."""
    eager = NormThenTwoLinears(recipe)
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True)
    x = torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, wanted = compiled(x), eager(x)
    assert torch.equal(y, wanted)
    for output in (y, wanted):
        output.float().square().sum().backward()
    for one, other in zip(traced.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-2)


def test_compiled_it_sums_as_tensor_cores_do():
    recipe = octavo.recipes.get("rowwise", emulate_tensor_cores=True)
    eager = Linear(64, 16, recipe=recipe)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True)
    x = torch.randn(8, 64)
    torch.testing.assert_close(compiled(x), eager(x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(eager(x), Linear.forward(_with_recipe(eager, "rowwise"), x), rtol=1e-6, atol=1e-6)


def _with_recipe(layer: Linear, recipe: str) -> Linear:
    other = Linear(layer.in_features, layer.out_features, recipe=recipe)
    other.load_state_dict(layer.state_dict())
    return other


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_under_another_delayed_recipe_the_first_call_makes_the_history(fullgraph):
    """Without it a graph cannot be traced whole, which is said; a graph that may break makes it on the way."""
    torch.compiler.reset()  # what it learnt of this layer's code in other tests
    layer = Linear(32, 16, recipe="tensorwise")
    compiled, eager = torch.compile(layer, fullgraph=fullgraph), copy.deepcopy(layer)
    x = torch.randn(4, 32)
    with octavo.autocast("delayed"):
        if fullgraph:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="no amax history yet; run it once"):
                compiled(x)
            layer(x).sum().backward()
            eager(x).sum().backward()
        for _ in range(3):
            y = compiled(x)
            assert torch.equal(y, eager(x))
            y.sum().backward()
            eager(x).sum().backward()
