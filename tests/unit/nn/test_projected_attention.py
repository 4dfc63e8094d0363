"""Against ``nn.MultiheadAttention`` itself, whose parameters the projected module keeps."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.nn.projected_attention import ProjectedAttention, join_projections, split_projections

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": CAUSAL},
    "causal, by its hint": {"attn_mask": CAUSAL, "is_causal": True},
    "bool": {"attn_mask": CAUSAL.isinf()},
    "of each head": {"attn_mask": torch.rand(8, 5, 5).gt(0.8).logical_and(~torch.eye(5, dtype=torch.bool))},
    "padding": {"key_padding_mask": PADDING},
    "both, by the hint": {
        "attn_mask": CAUSAL.isinf(),
        "key_padding_mask": PADDING,
        "is_causal": True,
    },
}


def _pair(**options):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 4, **options)
    if plain.in_proj_bias is not None:
        nn.init.normal_(plain.in_proj_bias)
        nn.init.normal_(plain.out_proj.bias)
    projected = copy.deepcopy(plain)
    assert list(split_projections(projected)) == [""]
    assert type(projected) is ProjectedAttention
    return plain, projected


def _assert_same(plain, projected, *inputs, **options):
    for ours, theirs in zip(projected(*inputs, **options), plain(*inputs, **options), strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_output_matches_torch_attention(mask, need_weights, batch_first):
    plain, projected = _pair(batch_first=batch_first, bias=batch_first)
    x = torch.randn(2, 5, 16) if batch_first else torch.randn(5, 2, 16)
    _assert_same(plain, projected, x, x, x, need_weights=need_weights, **MASKS[mask])
    y = x.flip(0)
    _assert_same(plain, projected, x, y, y, need_weights=need_weights, **MASKS[mask])
    _assert_same(plain, projected, x, y, x, need_weights=need_weights, average_attn_weights=False, **MASKS[mask])


def test_sequence_without_batch_dimension_is_accepted():
    plain, projected = _pair()
    x = torch.randn(5, 16)
    _assert_same(plain, projected, x, x, x, key_padding_mask=PADDING[1], attn_mask=CAUSAL.isinf())


def test_dropout_draws_as_torchs_does():
    plain, projected = _pair(dropout=0.4, batch_first=True)
    x = torch.randn(2, 5, 16)
    for need_weights in (False, True):
        results = []
        for module in (plain, projected):
            torch.manual_seed(7)
            results.append(module.train()(x, x, x, need_weights=need_weights)[0])
        torch.testing.assert_close(*results)


def test_gradients_reach_the_same_parameters():
    plain, projected = _pair(batch_first=True)
    x = torch.randn(2, 5, 16)
    for module in (plain, projected):
        module(x, x, x, need_weights=False)[0].square().sum().backward()
    torch.testing.assert_close(projected.in_proj.weight.grad, plain.in_proj_weight.grad)
    torch.testing.assert_close(projected.out_proj.weight.grad, plain.out_proj.weight.grad)


def test_parameters_and_keys_are_the_same_and_checkpoints_go_both_ways():
    model = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    parameters, state = set(model.parameters()), copy.deepcopy(model.state_dict())
    assert list(split_projections(model)) == ["self_attn"]
    assert set(model.parameters()) == parameters
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    plain = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.self_attn.in_proj_weight, state["self_attn.in_proj_weight"] + 1)


def test_joining_projections_restores_the_attention_module():
    model = nn.MultiheadAttention(16, 4)
    weight, shown = model.in_proj_weight, repr(model)
    join_projections(split_projections(model))
    assert type(model) is nn.MultiheadAttention
    assert model.in_proj_weight is weight
    assert repr(model) == shown


@pytest.mark.parametrize("options", [{"kdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_attention_with_extra_options_is_not_split(options):
    model = nn.MultiheadAttention(16, 4, **options)
    assert not split_projections(model)
    assert type(model) is nn.MultiheadAttention


def test_torchs_fast_path_does_not_go_round_its_recipes():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = layer(x)
        split_projections(layer)
        assert not octavo.convert(layer, "tensorwise").notes
        assert not torch.equal(layer(x), plain)
        with octavo.autocast(enabled=False):
            torch.testing.assert_close(layer(x), plain)


def test_the_hint_without_its_mask_is_refused():
    _, projected = _pair()
    x = torch.randn(5, 2, 16)
    with pytest.raises(ConfigError, match="give that mask too"):
        projected(x, x, x, is_causal=True)


def _encoder(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2, **options).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("split", ["encoder", "first layer"])
def test_torchs_encoder_makes_no_nested_tensor_of_padded_sequences(split, frozen, with_gradients):
    """By default it does, where it sees an ``in_proj_bias``, and gives all layers what their fast path alone takes."""
    model, x = _encoder(), torch.randn(2, 5, 16)
    model.requires_grad_(not frozen)
    with torch.no_grad():
        expected = _encoder(enable_nested_tensor=False)(x, src_key_padding_mask=PADDING)
        model(x, src_key_padding_mask=PADDING)  # as it is before
    changed = split_projections(model if split == "encoder" else model.layers[0])
    with torch.set_grad_enabled(with_gradients):
        torch.testing.assert_close(model(x, src_key_padding_mask=PADDING), expected)
    join_projections(changed)
    with torch.no_grad():
        assert not model(x, src_key_padding_mask=PADDING)[1, 3:].any(), "torch's nested tensors are padded with zeros"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused():
    """Of an encoder whose first layer alone is torch's own."""
    model, x = _encoder(), torch.randn(2, 5, 16)
    split_projections(model.layers[1])
    with torch.no_grad(), pytest.raises(ConfigError, match=r"nested tensor.*enable_nested_tensor=False"):
        model(x, src_key_padding_mask=PADDING)
