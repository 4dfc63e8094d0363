from typing import Any

import pytest
import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.nn import TransformerLayer, rotary_table
from tests.contract.transformer_oracle import Shape, assert_close, layer, spread_out, weights_of

# The constructor's arguments, and what of them the oracle must be told.
ARRANGEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pre-norm": ({}, {}),
    "llama": (
        {"normalization": "rmsnorm", "activation": "swiglu", "bias": False, "num_kv_heads": 1},
        {"normalization": "rmsnorm", "activation": "swiglu", "kv_heads": 1},
    ),
    "zero-centred": ({"zero_centered": True, "qk_norm": True, "eps": 1e-3}, {"zero_centered": True, "eps": 1e-3}),
    "parallel": ({"parallel": True, "activation": "srelu"}, {"parallel": True, "activation": "srelu"}),
    "post-norm": ({"norm_position": "post", "causal": False}, {"post": True, "causal": False}),
    "decoder": ({"layer_type": "decoder", "window": 2}, {"window": 2}),
    "post-norm decoder": (
        {"layer_type": "decoder", "norm_position": "post", "normalization": "rmsnorm", "head_dim": 4},
        {"normalization": "rmsnorm", "post": True},
    ),
}


def _layer(**changes):
    made = TransformerLayer(18, 29, 3, **{"recipe": "bf16", **changes})
    spread_out(made)
    return made


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_output_and_gradients(name):
    arguments, told = ARRANGEMENTS[name]
    ours = _layer(**arguments)
    decodes = ours.cross_attention is not None
    x, memory, up = torch.randn(2, 7, 18), torch.randn(2, 5, 18), torch.randn(2, 7, 18)
    inputs = [x.requires_grad_(), memory.requires_grad_()] if decodes else [x.requires_grad_()]
    extra = {"encoder_output": memory, "encoder_padding": torch.tensor([5, 2])} if decodes else {}
    y = ours(x, padding=torch.tensor([7, 4]), rotations=rotary_table(ours.self_attention.head_dim, 7, 50.0), **extra)
    weights, doubles = weights_of(ours), [t.detach().double().requires_grad_() for t in inputs]
    shape = Shape(**{"heads": 3, "kv_heads": 3, "theta": 50.0} | told)
    memories: dict[str, Any] = {"memory": doubles[1], "memory_lengths": [5, 2]} if decodes else {}
    exact = layer(weights, doubles[0], shape, lengths=[7, 4], **memories)
    assert_close(y, exact, relative=1e-5)
    actual = torch.autograd.grad(y, [*inputs, *ours.parameters()], up)
    expected = torch.autograd.grad(exact, [*doubles, *weights.values()], up.double())
    names = ["x", "memory"][: len(inputs)] + list(weights)
    for what, one, other in zip(names, actual, expected, strict=True):
        assert_close(one, other, relative=3e-5, what=what)


OURS_TO_TORCHS = {
    "attention_norm": "norm1", "self_attention.qkv.norm": "norm1", "self_attention.qkv.linear": "self_attn.in_proj",
    "self_attention.out": "self_attn.out_proj", "cross_attention.q.norm": "norm2", "cross_attention_norm": "norm2",
    "cross_attention.q.linear": "multihead_attn.in_proj", "cross_attention.kv": "multihead_attn.in_proj",
    "cross_attention.out": "multihead_attn.out_proj", "mlp.fc1": "linear1", "mlp.fc2": "linear2",
}  # fmt: skip


def _load_from_torch(ours, theirs):
    last_norm = "norm3" if ours.cross_attention is not None else "norm2"
    names = {**OURS_TO_TORCHS, "mlp_norm": last_norm, "mlp.norm": last_norm}
    state, loaded = theirs.state_dict(), {}
    for key in ours.state_dict():
        path, _, kind = key.rpartition(".")
        their_key = f"{names[path]}_{kind}" if names[path].endswith("in_proj") else f"{names[path]}.{kind}"
        rows = {"cross_attention.q.linear": slice(0, 18), "cross_attention.kv": slice(18, None)}.get(path, slice(None))
        loaded[key] = state[their_key][rows]
    ours.load_state_dict(loaded)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_an_encoder_equals_torchs(norm_first):
    theirs = nn.TransformerEncoderLayer(18, 3, 29, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    spread_out(theirs)
    ours = _layer(norm_position="pre" if norm_first else "post", causal=False)
    _load_from_torch(ours, theirs)
    x, lengths = torch.randn(2, 7, 18), torch.tensor([7, 4])
    expected = theirs(x, src_key_padding_mask=torch.arange(7) >= lengths[:, None])
    assert_close(ours(x, padding=lengths), expected, relative=1e-5)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_a_decoder_equals_torchs(norm_first):
    theirs = nn.TransformerDecoderLayer(18, 3, 29, 0.0, "relu", batch_first=True, norm_first=norm_first)
    spread_out(theirs)
    ours = _layer(norm_position="pre" if norm_first else "post", layer_type="decoder", activation="relu")
    _load_from_torch(ours, theirs)
    x, memory, lengths = torch.randn(2, 7, 18), torch.randn(2, 5, 18), torch.tensor([5, 2])
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    left_out = torch.arange(5) >= lengths[:, None]
    expected = theirs(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=left_out)
    assert_close(ours(x, encoder_output=memory, encoder_padding=lengths), expected, relative=1e-5)


def test_a_mask_reaches_self_attention():
    ours, free, x = _layer(), _layer(causal=False), torch.randn(2, 7, 18)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    assert_close(free(x, mask=mask), ours(x), relative=1e-5)


def test_dropout_is_for_training_and_touches_only_what_is_added():
    ours, x = _layer(dropout=0.999, bias=False), torch.randn(1, 2, 18)
    assert (ours(x) == x).any(), "most of what is added is dropped"
    assert torch.equal(ours.eval()(x), ours(x))
    assert not torch.equal(ours(x), x)
    assert ours.self_attention.attention.dropout == 0.0
    assert _layer(attention_dropout=0.25).self_attention.attention.dropout == 0.25


def test_decoding_with_a_cache_computes_what_the_whole_sequence_gives():
    ours = _layer(num_kv_heads=1, normalization="rmsnorm", activation="swiglu", layer_type="decoder").eval()
    x, memory, table = torch.randn(2, 8, 18), torch.randn(2, 5, 18), rotary_table(6, 8)
    cache = ours.self_attention.new_cache(2, 8)
    with torch.inference_mode():
        whole = ours(x, encoder_output=memory, rotations=table)
        parts = [ours(part, encoder_output=memory, rotations=table, cache=cache) for part in x.split(1, dim=1)]
    assert_close(torch.cat(parts, dim=1), whole, relative=3e-6)


def test_the_state_has_these_names():
    plain = {f"self_attention.qkv.{x}" for x in ("norm", "linear")} | {"self_attention.out"}
    plain |= {f"mlp.{x}" for x in ("norm", "fc1", "fc2")}
    assert {key.rpartition(".")[0] for key in _layer().state_dict()} == plain
    post = {"self_attention.qkv.linear", "self_attention.out", "mlp.fc1", "mlp.fc2", "attention_norm", "mlp_norm"}
    assert {key.rpartition(".")[0] for key in _layer(norm_position="post").state_dict()} == post
    cross = {f"cross_attention.{x}" for x in ("q.norm", "q.linear", "kv", "out")}
    assert {key.rpartition(".")[0] for key in _layer(layer_type="decoder").state_dict()} == plain | cross


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ffn_hidden_size": 0}, "ffn_hidden_size must be a whole number"),
        ({"num_heads": 4}, "4 does not divide 18"),
        ({"num_kv_heads": 2}, "2 does not divide 3"),
        ({"activation": "mish"}, "activation must be one of gelu"),
        ({"normalization": "x"}, "normalization must be one of"),
        ({"layer_type": "both"}, "layer_type must be one of encoder, decoder, not 'both'"),
        ({"norm_position": "mid"}, "norm_position must be one of pre, post, not 'mid'"),
        ({"dropout": -0.1}, "dropout must be a probability"),
        ({"attention_dropout": 1.0}, "dropout must be a probability"),
        ({"window": -2}, "window must be a whole number"),
        ({"eps": 0.0}, "eps must be a positive"),
        ({"recipe": "fp4"}, "there is no recipe"),
        ({"parallel": True, "layer_type": "decoder"}, "parallel attention and MLP need layer_type='encoder'"),
        ({"parallel": True, "norm_position": "post"}, "not 'encoder' and 'post'"),
    ],
)
def test_arguments_are_checked(arguments, words):
    with pytest.raises(ConfigError, match=words):
        TransformerLayer(**{"hidden_size": 18, "ffn_hidden_size": 29, "num_heads": 3, **arguments})


def test_inputs_are_checked():
    x, memory = torch.zeros(1, 2, 18), torch.zeros(1, 3, 18)
    with pytest.raises(ConfigError, match='encoder_output goes with layer_type="decoder"; give both or neither'):
        _layer()(x, encoder_output=memory)
    with pytest.raises(ConfigError, match="give both or neither"):
        _layer(layer_type="decoder")(x)
    with pytest.raises(ConfigError, match="encoder_padding goes with encoder_output"):
        _layer()(x, encoder_padding=torch.tensor([3]))


@torch.inference_mode()
def test_decoder_with_refused_encoder_padding_does_not_change_the_cache():
    made, memory = _layer(layer_type="decoder"), torch.zeros(1, 3, 18)
    cache = made.self_attention.new_cache(1, 4)
    with pytest.raises(ConfigError, match="lengths must be 0 to 3"):
        made(torch.zeros(1, 2, 18), encoder_output=memory, encoder_padding=torch.tensor([4]), cache=cache)
    assert cache.position == 0
