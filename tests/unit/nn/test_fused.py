"""Fused layers against the same layers one after the other: the kernels run in Triton's interpreter where no GPU is."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.kernels import fused_casts as kernels
from octavo.nn import LayerNormLinear, LayerNormMLP
from octavo.nn import fused as layers
from octavo.numerics.metrics import sqnr_db
from tests.contract.gemm_oracle import recorded_products
from tests.contract.transformer_oracle import spread_out
from tests.recorded_state import recorded_state

pytest.importorskip("triton", reason="triton is not installed")

RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DEVICES", (DEVICE,))


@contextmanager
def one_after_the_other() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "DEVICES", ())
        yield


def _mlp(recipe: str = "tensorwise", *, normalization: str = "rmsnorm", activation: str = "swiglu") -> LayerNormMLP:
    layer = LayerNormMLP(48, 40, recipe=recipe, device=DEVICE, normalization=normalization, activation=activation)
    spread_out(layer)
    return layer


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, 48, device=DEVICE, dtype=dtype, requires_grad=True)


def _train(layer: nn.Module, x: Tensor, up: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], up.to(y.dtype))]


def _is_fused(layer: LayerNormLinear | LayerNormMLP, x: Tensor) -> bool:
    """Whether a call passes by the forward of the norm's class."""
    calls = []

    def forward(norm: nn.Module, x: Tensor) -> Tensor:
        calls.append(norm)
        return plain(norm, x)

    plain = type(layer.norm).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer.norm), "forward", forward)
        layer(x)
    return not calls


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("normalization", "activation"), [("rmsnorm", "swiglu"), ("layernorm", "gelu")], ids=["rmsnorm", "layernorm"]
)
def test_output_and_gradients(recipe: str, normalization: str, activation: str) -> None:
    ours = _mlp(recipe, normalization=normalization, activation=activation)
    theirs = copy.deepcopy(ours)
    for _ in range(2 if recipe == "delayed" else 1):
        x, up = _x(2, 5), torch.randn(2, 5, 48, device=DEVICE)
        made = _train(ours, x, up)
        with one_after_the_other():
            wanted = _train(theirs, x, up)
        for name, got, exact in zip(["y", "x", *dict(ours.named_parameters())], made, wanted, strict=True):
            assert got.dtype is exact.dtype, name
            assert got.shape == exact.shape, name
            # Where the last bit of a norm moves a code, it moves by 2^-4 of its value; few do.
            assert sqnr_db(exact.float(), got.float()) > 35, name
    for name, exact in recorded_state(theirs).items():
        torch.testing.assert_close(recorded_state(ours)[name], exact, msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_layer_keeps_no_high_precision_intermediate(recipe: str) -> None:
    layer, x = _mlp(recipe), _x(6)
    layer(x)  # makes a delayed layer's history
    assert _is_fused(layer, x)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    wide = [t for t in kept if t.dtype is torch.float32 and t.shape in {(6, 40), (6, 48)}]
    assert {t.data_ptr() for t in wide} == {x.data_ptr()}  # the norm's input, not its result, nor the activation's
    narrow = {tuple(t.shape) for t in kept if t.itemsize == 1}
    assert not narrow & {(6, 40), (40, 6), (6, 48), (48, 6)}  # nor their codes, which are made again


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_orientations_reach_the_products(recipe: str) -> None:
    layer, x = LayerNormLinear(48, 24, normalization="rmsnorm", recipe=recipe, device=DEVICE), _x(6)
    with recorded_products() as made:
        layer(x).sum().backward()
    with one_after_the_other(), recorded_products() as wanted:
        layer(x).sum().backward()
    assert len(made) == len(wanted) == 3
    for ours, theirs in zip(made, wanted, strict=True):
        for got, exact in ((ours.a, theirs.a), (ours.b, theirs.b)):
            assert got.granularity == exact.granularity
            assert got.hp_dtype is exact.hp_dtype
            assert (got.data.float() != exact.data.float()).float().mean() < 0.02
            torch.testing.assert_close(got.fp32_scale, exact.fp32_scale, rtol=1e-6, atol=0)


def test_autocast_rounds_the_norm_once_to_its_dtype() -> None:
    ours = _mlp()
    x, up = _x(6), torch.randn(6, 48, device=DEVICE)
    theirs = copy.deepcopy(ours)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert _is_fused(ours, x)
        made = _train(ours, x, up)
        with one_after_the_other():
            wanted = _train(theirs, x, up)
    assert made[0].dtype is torch.bfloat16
    for got, exact in zip(made, wanted, strict=True):
        assert got.dtype is exact.dtype
        assert sqnr_db(exact.float(), got.float()) > 35


def test_another_recipe_and_none_inside_autocast() -> None:
    layer, x = _mlp(), _x(6)
    with octavo.autocast(recipe="rowwise"):
        assert _is_fused(layer, x)
    with octavo.autocast(enabled=False):
        assert not _is_fused(layer, x)


@torch.no_grad()
def test_a_static_input_in_evaluation() -> None:
    layer, x = LayerNormLinear(48, 24, normalization="rmsnorm", recipe="static", device=DEVICE).eval(), _x(6)
    layer.linear.input_scale.fill_(0.01)
    assert _is_fused(layer, x)
    with one_after_the_other():
        wanted = layer(x)
    torch.testing.assert_close(layer(x), wanted, rtol=0.05, atol=0.05)


def test_a_gradient_for_the_norm_alone() -> None:
    layer = LayerNormLinear(48, 24, recipe="tensorwise", device=DEVICE)
    layer.linear.requires_grad_(False)
    x = _x(6).detach()
    layer(x).square().sum().backward()
    for parameter in layer.norm.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    assert layer.linear.weight.grad is None


def test_nonfinite_elements_are_counted_as_without() -> None:
    ours, x = _mlp("delayed", activation="relu"), _x(6)
    theirs = copy.deepcopy(ours)
    with torch.no_grad():
        x[2, 3] = torch.nan
    ours(x).sum().backward()
    with one_after_the_other():
        theirs(x).sum().backward()
    for name, exact in recorded_state(theirs).items():
        torch.testing.assert_close(recorded_state(ours)[name], exact, msg=name)
    assert ours.fc1.nonfinite_counts[0] == 48


def test_checkpointing_counts_once() -> None:
    layer, x = _mlp("delayed"), _x(6)
    with torch.no_grad():
        x[2, 3] = torch.nan
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.fc1.nonfinite_counts[0] == 48


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layer: layer.fc1.register_forward_hook(lambda *_: None), "hooks"),
        (lambda layer: layer.norm.register_forward_pre_hook(lambda *_: None), "hooks"),
        (lambda layer: layer.fc1.register_full_backward_hook(lambda *_: None), "hooks"),
        (lambda layer: setattr(layer.norm, "forward", layer.norm.forward), "another forward"),
        (lambda layer: setattr(layer, "fc1", nn.Linear(48, 80, device=DEVICE)), "replaced"),
        (lambda layer: setattr(layer, "norm", nn.Identity()), "replaced"),
        (lambda layer: layer.fc1.set_recipe(octavo.recipes.get("bf16")), "recipe 'bf16' casts no input"),
        (
            lambda layer: layer.fc1.set_recipe(octavo.recipes.get("rowwise_hp_grad_weight")),
            "casts the input in another way for grad_weight",
        ),
        (lambda layer: nn.utils.parametrizations.weight_norm(layer.fc1), "another forward"),
    ],
)
def test_why_not(change, words: str) -> None:
    layer, x = _mlp(), _x(6)
    assert layers.unfused_reason(x, layer.fc1, layer.norm) is None
    change(layer)
    assert words in (layers.unfused_reason(x, layer.fc1, layer.norm) or "")
    assert layer(x).shape == x.shape


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(3, 48, dtype=torch.float64, device=DEVICE), "float32, bfloat16 and float16"),
        (torch.zeros(0, 48, device=DEVICE), "empty"),
        (torch.zeros(3, 47, device=DEVICE), "refuse inputs"),
    ],
)
def test_inputs_that_no_kernel_takes(x: Tensor, words: str) -> None:
    layer = _mlp()
    assert words in (layers.unfused_reason(x, layer.fc1, layer.norm) or "")


def test_where_there_is_no_kernel_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DEVICES", ("cuda",))
    layer, x = _mlp().cpu(), torch.zeros(3, 48)
    assert layers.unfused_reason(x, layer.fc1, layer.norm) == "the kernels run on cuda, and the tensor is on cpu"


def test_torch_func_goes_through_the_layers_one_after_the_other() -> None:
    layer, x = LayerNormLinear(48, 24, device=DEVICE), _x(3).detach()
    seen = []

    def loss(x: Tensor) -> Tensor:
        seen.append(layers.unfused_reason(x, layer.linear, layer.norm))
        return x.sum()

    torch.func.grad(loss)(x)
    assert seen == ["the kernels do not support torch.func"]


def test_hooks_of_every_module_are_seen() -> None:
    layer, x = _mlp(), _x(3)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "hooks of every module" in (layers.unfused_reason(x, layer.fc1, layer.norm) or "")
    finally:
        hook.remove()


def test_autocast_to_another_dtype_between_the_layers_prevents_fusion() -> None:
    layer, x = _mlp(), torch.zeros(3, 48, dtype=torch.bfloat16, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        reason = layers.unfused_reason(x, layer.fc1, layer.norm)
    assert reason == "torch.bfloat16 is rounded to torch.float16 between the two layers"


def test_tensors_of_another_class_are_left_to_the_layers() -> None:
    class Marked(Tensor):
        pass

    layer, x = _mlp(), torch.zeros(3, 48, device=DEVICE).as_subclass(Marked)
    assert layers.unfused_reason(x, layer.fc1, layer.norm) == "the kernels take plain tensors"


def test_the_norms_output_on_request_is_made() -> None:
    layer = LayerNormLinear(48, 24, return_norm_output=True, device=DEVICE)
    x = _x(6)
    y, normed = layer(x)
    assert torch.equal(normed, layer.norm(x))
    assert y.shape == (6, 24)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_one_graph(recipe: str) -> None:
    layer, x, up = _mlp(recipe), _x(6), torch.randn(6, 48, device=DEVICE)
    _train(layer, x, up)
    compiled = copy.deepcopy(layer)
    compiled.compile(backend="aot_eager", fullgraph=True)
    made, wanted = _train(compiled, x, up), _train(layer, x, up)
    for got, exact in zip(made, wanted, strict=True):
        torch.testing.assert_close(got, exact)


def test_placeholder_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, up = _mlp(), _x(6), torch.randn(6, 48, device=DEVICE)
    wanted = _train(layer, x, up)
    poisoned = []

    def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        poisoned.append(torch.full((), torch.nan, dtype=dtype, device=device).expand(shape))
        return poisoned[-1]

    monkeypatch.setattr(layers, "_placeholder", placeholder)
    made = _train(layer, x, up)
    assert len(poisoned) == 2
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_memory_of_a_training_step(recipe: str) -> None:
    layer = LayerNormMLP(
        1024, 4096, activation="swiglu", normalization="rmsnorm", recipe=recipe, device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()  # what is made once: histories, workspaces

    def kept() -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = layer(x)
        held = torch.cuda.memory_allocated() - before
        y.sum().backward()
        return held

    with one_after_the_other():
        plain = kept()
    # The norm's statistics and FP32 copy of x, and one of the activation's two inputs to its product, are not kept.
    assert kept() < 0.8 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_a_captured_step_repeats(recipe: str) -> None:
    layer, x, up = _mlp(recipe), _x(64), torch.randn(64, 48, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            _train(layer, x, up)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _train(layer, x, up)
    graph.replay()
    torch.cuda.synchronize()
    if recipe != "delayed":  # whose scales move from step to step
        for got, exact in zip(captured, _train(layer, x, up), strict=True):
            torch.testing.assert_close(got, exact)
    assert all(t.isfinite().all() for t in captured)
