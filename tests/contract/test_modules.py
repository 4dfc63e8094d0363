"""Every fused module under every way of running it: recipes, precisions, shapes, autocast, compile, checkpointing."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn import LayerNormLinear, LayerNormMLP, Linear, MultiheadAttention, TransformerLayer, rotary_table
from octavo.numerics import sqnr_db
from tests.contract.gemm_oracle import Product, recorded_products
from tests.contract.transformer_oracle import assert_close, spread_out

RECIPES = tuple(name for name in octavo.recipes.names() if name != "static")  # it needs a calibration
FP8_RECIPES = tuple(name for name in RECIPES if name != "bf16")
HIDDEN = 48
LLAMA: dict[str, Any] = {"normalization": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "qk_norm": True}

# What module stands for, and how many products its forward needs.
MODULES: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "layernorm_linear": (lambda **kw: LayerNormLinear(HIDDEN, 80, **kw), 1),
    "layernorm_mlp": (lambda **kw: LayerNormMLP(HIDDEN, 80, activation="geglu", **kw), 2),
    "attention": (lambda **kw: MultiheadAttention(HIDDEN, 4, num_kv_heads=2, input_layernorm=True, **kw), 2),
    "transformer": (lambda **kw: TransformerLayer(HIDDEN, 80, 4, **LLAMA, **kw), 4),
}


def _make(name: str, recipe: str = "tensorwise", **options: Any) -> nn.Module:
    torch.manual_seed(3)
    module = MODULES[name][0](recipe=recipe, **options)
    spread_out(module)
    return module


def _gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, the input's gradient and the parameters'."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    generator = torch.Generator().manual_seed(4)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return [y.detach(), *(_grad(tensor) for tensor in (x, *module.parameters()))]


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()


def _equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def _distinct(products: list[Product]) -> int:
    """How many quantized tensors took part: operands that share their codes' memory are one."""
    return len({side.data.untyped_storage().data_ptr() for product in products for side in (product.a, product.b)})


@pytest.mark.parametrize("name", MODULES)
def test_each_input_and_weight_is_quantized_once(name):
    """Norm output for q, k and v; for gate and up: one product each, three quantizations a linear layer and step.

    Of fewer rows backward casts the weights again.
    """
    module, x = _make(name), torch.randn(2, 128, HIDDEN, requires_grad=True)
    count = MODULES[name][1]
    with recorded_products() as products:
        y = module(x)
        assert len(products) == count
        assert _distinct(products) == 2 * count
        y.sum().backward()
    assert len(products) == 3 * count
    assert _distinct(products) == 3 * count


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_fp8_is_near_and_not_the_same(name, recipe):
    exact, module = _make(name, "bf16"), _make(name, recipe)
    x = torch.randn(4, 16, HIDDEN)
    found, expected = _gradients(module, x), _gradients(exact, x)
    assert sqnr_db(expected[0], found[0]) < 60
    assert all(sqnr_db(other, one) > 12 for one, other in zip(found, expected, strict=True))


def _by_hand(layer: Any, x: Tensor) -> Tensor:
    """A pre-norm layer with LayerNorm and GELU, from its own linear layers and torch's functions."""
    width, attention, mlp = x.shape[-1], layer.self_attention, layer.mlp
    qkv = attention.qkv.linear(F.layer_norm(x, (width,), attention.qkv.norm.weight, attention.qkv.norm.bias))
    q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + attention.out(attended)
    normed = F.layer_norm(x, (width,), mlp.norm.weight, mlp.norm.bias)
    result: Tensor = x + mlp.fc2(F.gelu(mlp.fc1(normed)))
    return result


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformer_layer_equals_its_parts_bit_for_bit(recipe):
    layer = TransformerLayer(HIDDEN, 80, 4, recipe=recipe)
    spread_out(layer)
    other, x = copy.deepcopy(layer), torch.randn(2, 5, HIDDEN)
    by_hand = nn.Module()
    by_hand.layer, by_hand.forward = other, lambda x: _by_hand(other, x)
    for step in range(2):  # the second reads what the first recorded
        assert _equal(_gradients(layer, x * 2**step), _gradients(by_hand, x * 2**step))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_octavos_autocast_reaches_the_inner_layers(name, recipe):
    x = torch.randn(2, 5, HIDDEN)
    module, plain = _make(name, recipe), _make(name, "bf16")
    with octavo.autocast(enabled=False):
        assert _equal(_gradients(module, x), _gradients(plain, x))
    with octavo.autocast(recipe):
        assert _equal(_gradients(plain, x), _gradients(_make(name, recipe), x))


@pytest.mark.parametrize("name", MODULES)
def test_convert_and_restore_reach_the_inner_layers(name):
    x, module = torch.randn(2, 5, HIDDEN), _make(name)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    report = octavo.convert(module, "rowwise")
    assert len(report.converted) == MODULES[name][1]
    assert not report.skipped
    assert _equal(_gradients(module, x), _gradients(_make(name, "rowwise"), x))
    octavo.restore(module)
    assert not any(isinstance(inner, Linear) for inner in module.modules())
    assert _equal(_gradients(module, x), _gradients(_make(name, "bf16"), x))
    assert list(state) == list(module.state_dict())
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_16_bit_parameters(name, dtype, recipe):
    module, wide = _make(name, recipe).to(dtype), _make(name, recipe)
    x = torch.randn(4, 16, HIDDEN).to(dtype)
    found, expected = _gradients(module, x), _gradients(wide, x.float())
    assert {tensor.dtype for tensor in found} == {dtype}
    for one, other in zip(found, expected, strict=True):
        assert sqnr_db(other, one.float()) > (25 if recipe == "bf16" else 12)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_the_residual_stream_keeps_its_dtype_under_autocast(recipe, stream, norm_position):
    layer, x = TransformerLayer(HIDDEN, 80, 4, recipe=recipe, norm_position=norm_position), torch.randn(2, 5, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.to(stream))
        parts = layer.self_attention(x), layer.mlp(x)
    assert y.dtype is stream
    assert [part.dtype for part in parts] == [torch.bfloat16, torch.bfloat16]
    y.sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters() if parameter.grad is not None} == {torch.float32}
    assert_close(y, layer(x), relative=0.1)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 5, HIDDEN), (2, 0, HIDDEN), (1, 1, HIDDEN), (3, 7, HIDDEN)], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_empty_and_odd_shapes(name, shape, recipe):
    found = _gradients(_make(name, recipe), torch.randn(shape))
    assert found[0].shape[:-1] == shape[:-1]
    assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_widths(recipe):
    layer = TransformerLayer(33, 37, 3, head_dim=5, num_kv_heads=1, activation="reglu", recipe=recipe)
    exact = TransformerLayer(33, 37, 3, head_dim=5, num_kv_heads=1, activation="reglu", recipe="bf16")
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, 33)
    for one, other in zip(_gradients(layer, x), _gradients(exact, x), strict=True):
        assert sqnr_db(other, one) > 12


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_activation_checkpointing_changes_no_bit(name, recipe, use_reentrant):
    plain, saving = _make(name, recipe), _make(name, recipe)
    recomputed = nn.Module()
    recomputed.inner = saving
    recomputed.forward = lambda x: checkpoint(saving, x, use_reentrant=use_reentrant)
    for step in range(3):
        x = torch.randn(2, 5, HIDDEN) * 2**step
        assert _equal(_gradients(plain, x), _gradients(recomputed, x))
    state, same = octavo.scaling_state(plain), octavo.scaling_state(saving)
    assert state.keys() == same.keys()
    assert all(torch.equal(state[key], same[key]) for key in state)


def test_recomputed_dropout_is_the_same():
    layer = TransformerLayer(HIDDEN, 80, 4, dropout=0.3, attention_dropout=0.3, recipe="tensorwise")
    results = []
    for wrap in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(8)
        module = nn.Module()
        module.inner, module.forward = layer, wrap
        results.append(_gradients(module, torch.ones(2, 5, HIDDEN)))
    assert _equal(*results)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    """So that one test's graphs do not count towards the next one's limit of recompilations."""
    yield
    torch.compiler.reset()


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "windowed, parallel": {"window": 3, "parallel": True, "zero_centered": True},
    "post-norm, no mask": {"norm_position": "post", "causal": False},
    "decoder": {"layer_type": "decoder"},
}


class _Run(nn.Module):
    """A layer with everything that it takes, as one function of x."""

    def __init__(self, layer: TransformerLayer) -> None:
        super().__init__()
        self.layer, (self.cos, self.sin) = layer, rotary_table(12, 8)
        self.memory, self.lengths = torch.ones(2, 3, HIDDEN), torch.tensor([8, 5])

    def forward(self, x: Tensor) -> Tensor:
        memory = None if self.layer.cross_attention is None else self.memory
        y: Tensor = self.layer(x, encoder_output=memory, padding=self.lengths, rotations=(self.cos, self.sin))
        return y


@pytest.mark.long
@pytest.mark.parametrize(
    ("arrangement", "recipe"),
    [*((arrangement, "tensorwise") for arrangement in ARRANGEMENTS), ("llama", "bf16"), ("llama", "delayed")],
)
@pytest.mark.usefixtures("_fresh_compiler")
def test_transformer_layer_traces_into_one_graph(arrangement, recipe):
    """Forward and backward; what is traced computes the same."""
    layer = TransformerLayer(HIDDEN, 80, 4, recipe=recipe, **ARRANGEMENTS[arrangement])
    spread_out(layer)
    eager, traced = _Run(layer), _Run(copy.deepcopy(layer))
    compiled = torch.compile(traced, fullgraph=True, backend="eager")
    for step in range(2):
        x = torch.randn(2, 8, HIDDEN) * 2**step
        for one, other in zip(_gradients(compiled, x), _gradients(eager, x), strict=True):  # type: ignore[arg-type]
            assert sqnr_db(other, one) > (100 if recipe == "bf16" else 30)


@pytest.mark.long
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_it_computes_the_same():
    """By the compiler itself. It may fuse the norms and round otherwise: a code here and there is its neighbour."""
    eager = _Run(TransformerLayer(HIDDEN, 80, 4, **LLAMA))
    spread_out(eager)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True)
    x = torch.randn(2, 8, HIDDEN)
    for one, other in zip(_gradients(compiled, x), _gradients(eager, x), strict=True):  # type: ignore[arg-type]
        assert sqnr_db(other, one) > 30


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stack_trains(recipe):
    """The second half of a sequence repeats the first: attention must find it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(12, 32),
        *(TransformerLayer(32, 64, 4, normalization="rmsnorm", activation="swiglu", recipe=recipe) for _ in range(2)),
        octavo.nn.RMSNorm(32),
        nn.Linear(32, 12),
    )
    positions = nn.Parameter(0.1 * torch.randn(8, 32))
    optimizer, losses = torch.optim.AdamW([*model.parameters(), positions], lr=5e-3), []
    for _ in range(25):
        half = torch.randint(12, (16, 4))
        tokens = torch.cat((half, half), dim=1)
        logits = model[1:](model[0](tokens) + positions)
        loss = F.cross_entropy(logits[:, 3:-1].flatten(0, 1), tokens[:, 4:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses


def test_scaling_state_names_the_inner_layers():
    layer = TransformerLayer(HIDDEN, 80, 4, recipe="delayed")
    layer(torch.randn(2, 5, HIDDEN)).sum().backward()
    paths = {key.rsplit(".", 2)[0] for key in octavo.scaling_state(layer)}
    assert paths == {"self_attention.qkv.linear", "self_attention.out", "mlp.fc1", "mlp.fc2"}
