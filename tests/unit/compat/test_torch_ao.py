"""torch.ao.quantization's program with octavo's QConfig, beside octavo's own two calls on a twin: equal to the bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization as ao

import octavo
from octavo.compat.torch_ao import fp8_qconfig
from octavo.errors import ConfigError
from octavo.quantization.qat.linear import QATLinear
from octavo.quantization.qat.prepare import NO_SCALE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
]
VOCABULARY = 40
PROJECTED = ("transformer.self_attn.in_proj", "transformer.self_attn.out_proj")
LAYERS = (*PROJECTED, "transformer.linear1", "transformer.linear2")


class SimpleLM(nn.Module):
    """The article's."""

    def __init__(self, vocab_size, hidden_dim):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_dim)
        self.transformer = nn.TransformerEncoderLayer(d_model=hidden_dim, nhead=8, batch_first=True)
        self.lm_head = nn.Linear(hidden_dim, vocab_size)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = self.transformer(x)
        return self.lm_head(x)


def _twins():
    torch.manual_seed(0)
    model = SimpleLM(VOCABULARY, 64)
    return model, copy.deepcopy(model)


def _trained(model, steps=4):
    """The article's second step; returns the losses."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # of dropout
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (2, 12), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _assert_equal(one, other):
    for tensors in ("state_dict", None):
        ours, theirs = (octavo.scaling_state(m) if tensors is None else m.state_dict() for m in (one, other))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    assert [type(each) for each in one.modules()] == [type(each) for each in other.modules()]
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(one.eval()(ids), other.eval()(ids))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("static", {}),
        ("static", {"scales": "learned", "clip_gradients": True, "convert_head": True}),
        ("tensorwise", {"skip": ["*linear1"]}),
        ("rowwise", {"overrides": {"*linear2": "bf16"}}),
        ("weight_only", {"layer_filter": lambda path, _: path != "transformer.linear2"}),
    ],
)
def test_torch_ao_program_matches_octavo_calls(recipe, options, inplace):
    model, twin = _twins()
    model.qconfig = fp8_qconfig(recipe, **options)
    model = ao.prepare_qat(model, inplace=inplace)
    octavo.prepare_qat(twin, recipe, **options)
    assert _trained(model) == _trained(twin)
    model = ao.convert(model, inplace=inplace)
    octavo.convert_qat(twin)
    _assert_equal(model, twin)
    assert not any(hasattr(each, "qconfig") for each in model.modules())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_attentions_projections_are_in_fp8():
    model, _ = _twins()
    model.qconfig = fp8_qconfig()
    model = ao.prepare_qat(model)
    assert {path for path, each in model.named_modules() if isinstance(each, QATLinear)} == set(LAYERS)
    _trained(model)
    scales = octavo.scaling_state(ao.convert(model))
    assert scales.keys() == {f"{path}.input.scale" for path in LAYERS}
    assert all(scale > 0 for scale in scales.values())


def test_a_copy_is_prepared_and_a_copy_converted():
    model, twin = _twins()
    model.qconfig = fp8_qconfig()
    prepared = ao.prepare_qat(model)
    assert [type(each) for each in model.modules()] == [type(each) for each in twin.modules()]
    _trained(prepared)
    ao.convert(prepared)
    assert sum(isinstance(each, QATLinear) for each in prepared.modules()) == len(LAYERS)
    assert _trained(prepared), "training goes on"


def test_qconfig_of_a_submodule_takes_precedence():
    model, _ = _twins()
    model.qconfig = fp8_qconfig()
    model.transformer.self_attn.qconfig = None
    model.transformer.linear2.qconfig = fp8_qconfig("tensorwise")
    model = ao.prepare_qat(model)
    recipes = {path: each.recipe.name for path, each in model.named_modules() if isinstance(each, QATLinear)}
    assert recipes == {"transformer.linear1": "static", "transformer.linear2": "tensorwise"}
    _trained(model)
    assert octavo.scaling_state(ao.convert(model)).keys() == {"transformer.linear1.input.scale"}


def test_a_qconfig_within_a_model_leaves_the_rest():
    model, _ = _twins()
    model.transformer.qconfig = fp8_qconfig(convert_head=True)
    model = ao.prepare_qat(model)
    assert {path for path, each in model.named_modules() if isinstance(each, QATLinear)} == set(LAYERS)
    _trained(model)
    assert type(ao.convert(model).lm_head) is nn.Linear


def test_a_layer_that_no_training_reached_is_named():
    model, _ = _twins()
    model.qconfig = fp8_qconfig()
    prepared = ao.prepare_qat(model)
    with pytest.warns(UserWarning, match="no training forward has reached it") as told:
        model = ao.convert(prepared)
    assert {f"layer {path!r} is {NO_SCALE}" for path in LAYERS} <= {str(each.message) for each in told}
    assert type(model.transformer.linear1) is nn.Linear


def test_recipes_that_prepare_qat_refuses_are_refused():
    with pytest.raises(TypeError, match="colour"):
        fp8_qconfig(colour="red")
    with pytest.raises(ConfigError, match="delayed"):
        fp8_qconfig("delayed")
    model, _ = _twins()
    model.qconfig = fp8_qconfig(skip=["nowhere"])
    with pytest.raises(ConfigError, match="'nowhere' matches no layer"):
        ao.prepare_qat(model, inplace=True)
    assert type(model.transformer.self_attn) is nn.MultiheadAttention


def test_a_qconfig_of_a_layer_that_multiplies_nothing_is_refused():
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model[1].qconfig = fp8_qconfig()
    with pytest.raises(ConfigError, match="LayerNorm is not a layer that octavo trains for FP8"):
        ao.prepare_qat(model)


def test_errors_are_not_suppressed_by_torch_ao():
    """Torch takes an AttributeError or TypeError of a QConfig's constructors for an answer."""
    model, _ = _twins()
    model.qconfig = fp8_qconfig(layer_filter=lambda path, layer: layer.no_such_thing)
    with pytest.raises(ConfigError, match="no_such_thing"):
        ao.prepare_qat(model)


def test_torchs_own_qconfig_cannot_prepare_the_articles_model():
    """Why the projections need more than the parts of a QConfig; if this fails, torch has learned it."""
    model, _ = _twins()
    model.qconfig = ao.get_default_qat_qconfig()
    with pytest.raises(AssertionError, match="NonDynamicallyQuantizableLinear"):
        ao.prepare_qat(model)


def test_torchs_own_convert_takes_no_fp8_weights():
    """Why a fake quantization of octavo's in the QConfig would not do for plain layers either."""
    fake = ao.FakeQuantize.with_args(observer=ao.MinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8)
    model: Any = nn.Sequential(nn.Linear(8, 8))
    model.qconfig = ao.QConfig(activation=fake, weight=fake)
    prepared = ao.prepare_qat(model)
    prepared[0].weight_fake_quant.dtype = torch.float8_e4m3fn
    prepared(torch.ones(1, 8))
    with pytest.raises(AssertionError, match=r"must have dtype torch\.qint8, got torch\.float8_e4m3fn"):
        ao.convert(prepared)
