from typing import Any

import pytest
import torch

from octavo import nn as octavo_nn
from octavo.compat.transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)
from octavo.compat.transformer_engine.pytorch import TransformerLayer, autocast
from octavo.errors import ConfigError
from tests.contract.transformer_oracle import Shape, assert_close, layer, spread_out, weights_of

NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def _layer(**options):
    made = TransformerLayer(24, 40, 4, **NO_DROPOUT, **options)
    spread_out(made)
    return made


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, {"activation": "gelu_tanh"}),
        ({"activation": "swiglu", "normalization": "RMSNorm", "bias": False}, {"normalization": "rmsnorm"}),
        ({"parallel_attention_mlp": True, "zero_centered_gamma": True}, {"parallel": True, "zero_centered": True}),
        ({"num_gqa_groups": 2, "window_size": (2, 0)}, {"kv_heads": 2, "window": 2}),
        ({"self_attn_mask_type": "no_mask", "layernorm_epsilon": 1e-2}, {"causal": False, "eps": 1e-2}),
    ],
)
def test_output_and_gradients(options, told):
    ours = _layer(**options)
    x, up = torch.randn(5, 2, 24, requires_grad=True), torch.randn(5, 2, 24)
    activation = {"activation": "swiglu" if "activation" in options else "gelu_tanh"}
    shape = Shape(**({"heads": 4, "kv_heads": 4} | activation | told))
    weights = {name.removeprefix("layer."): weight for name, weight in weights_of(ours).items()}
    exact_x = x.detach().transpose(0, 1).double().requires_grad_()
    exact = layer(weights, exact_x, shape, lengths=[5, 5])
    y = ours(x)
    assert_close(y.transpose(0, 1), exact, relative=1e-5)
    found = torch.autograd.grad(y, [x, *ours.parameters()], up)
    expected = torch.autograd.grad(exact, [exact_x, *weights.values()], up.transpose(0, 1).double())
    assert_close(found[0].transpose(0, 1), expected[0], relative=3e-5)
    for one, other, name in zip(found[1:], expected[1:], weights, strict=True):
        assert_close(one, other, relative=3e-5, what=name)


def test_a_decoder_and_padding():
    ours = _layer(layer_type="decoder", self_attn_mask_type="padding_causal", enc_dec_attn_mask_type="padding")
    x, memory = torch.randn(5, 2, 24), torch.randn(3, 2, 24)
    hides = torch.arange(5) >= torch.tensor([[5], [4]])
    hides_memory = torch.arange(3) >= torch.tensor([[2], [3]])
    y = ours(
        x,
        attention_mask=hides[:, None, None],
        encoder_output=memory,
        enc_dec_attn_mask=(hides[:, None, None], hides_memory[:, None, None]),
    )
    weights = {name.removeprefix("layer."): weight for name, weight in weights_of(ours).items()}
    expected = layer(
        weights,
        x.transpose(0, 1).double(),
        Shape(heads=4, kv_heads=4, activation="gelu_tanh"),
        lengths=[5, 4],
        memory=memory.transpose(0, 1).double(),
        memory_lengths=[2, 3],
    )
    assert_close(y.transpose(0, 1), expected, relative=1e-5)


def test_the_layouts_are_each_others_transpose():
    first, last = _layer(), _layer(attn_input_format="bshd")
    last.load_state_dict(first.state_dict())
    x = torch.randn(5, 2, 24)
    assert torch.equal(first(x).transpose(0, 1), last(x.transpose(0, 1)))


def test_both_dropouts_are_a_tenth_unless_given():
    inner = TransformerLayer(8, 8, 2).layer
    assert (inner.dropout, inner.self_attention.attention.dropout) == (0.1, 0.1)


RECIPES = [
    DelayedScaling(),
    DelayedScaling(fp8_format=Format.E4M3),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{type(recipe).__name__}-{recipe.fp8_format.name}")
def test_autocast_block_computes_octavos_layer_of_that_recipe(recipe):
    """Output and gradients to the bit."""
    ours, x = _layer(attn_input_format="bshd"), torch.randn(2, 5, 24, requires_grad=True)
    plain = octavo_nn.TransformerLayer(24, 40, 4, activation="gelu_tanh", recipe=recipe.octavo_recipe())
    plain.load_state_dict(ours.layer.state_dict())
    for _ in range(2):
        with autocast(recipe=recipe):
            y = ours(x)
        expected = plain(x)
        assert torch.equal(y, expected)
        found = torch.autograd.grad(y.square().sum(), [x, *ours.parameters()])
        for one, other in zip(
            found, torch.autograd.grad(expected.square().sum(), [x, *plain.parameters()]), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {"output_layernorm": True},
        {"apply_residual_connection_post_layernorm": True},
        {"drop_path_rate": 0.5},
        {"enc_dec_attn_mask_type": "causal"},
        {"layer_type": "both"},
        {"normalization": "BatchNorm"},
        {"attn_input_format": "thd"},
    ],
)
def test_unsupported_values_are_refused(options):
    with pytest.raises(ConfigError, match="|".join(map(str, options.values()))):
        TransformerLayer(24, 40, 4, **options)


def test_a_mask_that_would_not_be_read_is_refused():
    """A causal layer reads no mask; where it is silently left out, padding is attended to."""
    with pytest.raises(ConfigError, match="mask"):
        _layer()(torch.randn(5, 2, 24), attention_mask=torch.zeros(2, 1, 1, 5, dtype=torch.bool))
