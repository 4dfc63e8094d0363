"""Checkpoints as Transformer Engine writes them: its names and its order of rows."""

import copy
import pickle

import pytest
import torch
from torch import nn

from octavo.compat.transformer_engine import pytorch as te

HIDDEN, FFN, HEADS, GROUPS, D = 12, 20, 4, 2, 3


def _tensor(*shape):
    return torch.randn(*shape)


def _pair(source, rows, columns=None):
    shape = (rows,) if columns is None else (rows, columns)
    return {f"{source}weight": _tensor(*shape), f"{source}bias": _tensor(rows)}


def _checkpoint(prefix="", *, decoder=False):
    """A layer's, in parts, with the names that its documentation and its state_dict have."""
    q, kv = HEADS * D, GROUPS * D
    attention = f"{prefix}self_attention."
    found = _pair(f"{attention}layernorm_qkv.layer_norm_", HIDDEN)
    for part, rows in (("query", q), ("key", kv), ("value", kv)):
        found |= _pair(f"{attention}layernorm_qkv.{part}_", rows, HIDDEN)
    found |= _pair(f"{attention}proj.", HIDDEN, q)
    if decoder:
        cross = f"{prefix}inter_attention."
        found |= _pair(f"{cross}layernorm_query.layer_norm_", HIDDEN) | _pair(
            f"{cross}layernorm_query.query_", q, HIDDEN
        )
        found |= _pair(f"{cross}key_value.key_", kv, HIDDEN) | _pair(f"{cross}key_value.value_", kv, HIDDEN)
        found |= _pair(f"{cross}proj.", HIDDEN, q)
    mlp = f"{prefix}layernorm_mlp."
    return (
        found | _pair(f"{mlp}layer_norm_", HIDDEN) | _pair(f"{mlp}fc1_", FFN, HIDDEN) | _pair(f"{mlp}fc2_", HIDDEN, FFN)
    )


def _layer(**options):
    return te.TransformerLayer(HIDDEN, FFN, HEADS, GROUPS, **options).eval()


def test_every_tensor_of_a_layer_is_loaded():
    state, layer = _checkpoint("layers.0.", decoder=True), _layer(layer_type="decoder")
    nn.ModuleDict({"layers": nn.ModuleList([layer])}).load_state_dict(state)
    at, inner = "layers.0.", layer.layer
    qkv = [state[f"{at}self_attention.layernorm_qkv.{part}_weight"] for part in ("query", "key", "value")]
    assert torch.equal(inner.self_attention.qkv.linear.weight, torch.cat(qkv))
    kv = [state[f"{at}inter_attention.key_value.{part}_bias"] for part in ("key", "value")]
    assert torch.equal(inner.cross_attention.kv.bias, torch.cat(kv))
    for ours, theirs in {
        inner.self_attention.qkv.norm.weight: "self_attention.layernorm_qkv.layer_norm_weight",
        inner.self_attention.out.bias: "self_attention.proj.bias",
        inner.cross_attention.q.norm.bias: "inter_attention.layernorm_query.layer_norm_bias",
        inner.cross_attention.q.linear.weight: "inter_attention.layernorm_query.query_weight",
        inner.cross_attention.out.weight: "inter_attention.proj.weight",
        inner.mlp.norm.bias: "layernorm_mlp.layer_norm_bias",
        inner.mlp.fc1.weight: "layernorm_mlp.fc1_weight",
        inner.mlp.fc2.bias: "layernorm_mlp.fc2_bias",
    }.items():
        assert torch.equal(ours, state[f"{at}{theirs}"]), theirs


def test_the_caller_keeps_the_checkpoint():
    state = _checkpoint()
    keys = list(state)
    _layer().load_state_dict(state)
    assert list(state) == keys


def _interleaved(parts, shares):
    """Group by group: that group's rows of every part."""
    pieces = []
    for group in range(GROUPS):
        for part, share in zip(parts, shares, strict=True):
            rows = share * D
            pieces.append(part[group * rows : (group + 1) * rows])
    return torch.cat(pieces)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_fused_weight_is_put_in_order(interleaved):
    state = _checkpoint(decoder=True)
    expected = _layer(layer_type="decoder")
    expected.load_state_dict(state)
    for source, names, shares in (
        ("self_attention.layernorm_qkv.", ("query", "key", "value"), (HEADS // GROUPS, 1, 1)),
        ("inter_attention.layernorm_query.", ("query",), None),
        ("inter_attention.key_value.", ("key", "value"), (1, 1)),
    ):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{source}{name}_{kind}") for name in names]
            mixed = interleaved and shares is not None
            state[f"{source}{kind}"] = _interleaved(parts, shares) if mixed else torch.cat(parts)
    layer = _layer(layer_type="decoder", fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
    layer.load_state_dict(state)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(layer.state_dict()[name], tensor), name


def test_the_other_modules_read_theirs():
    linear, norm = te.LayerNormLinear(4, 6), te.LayerNorm(4)
    state = _pair("", 6, 4) | _pair("layer_norm_", 4)
    linear.load_state_dict(state)
    assert torch.equal(linear.layer.linear.weight, state["weight"])
    assert torch.equal(linear.layer.get_parameter("norm.bias"), state["layer_norm_bias"])
    norm.load_state_dict(_pair("", 4))
    te.Linear(4, 6).load_state_dict(_pair("", 6, 4) | {"_extra_state": None})
    mlp = te.LayerNormMLP(4, 6, bias=False, normalization="RMSNorm")
    state = {"layer_norm_weight": _tensor(4), "fc1_weight": _tensor(6, 4), "fc2_weight": _tensor(4, 6)}
    mlp.load_state_dict(state)
    assert torch.equal(mlp.layer.fc2.weight, state["fc2_weight"])
    attention = te.MultiheadAttention(HIDDEN, HEADS, num_gqa_groups=GROUPS)
    parts = [_pair(f"qkv.{p}_", r, HIDDEN) for p, r in (("query", 12), ("key", 6), ("value", 6))]
    state = parts[0] | parts[1] | parts[2] | _pair("proj.", HIDDEN, HIDDEN)
    attention.load_state_dict(state)
    assert torch.equal(attention.attention.qkv.linear.weight[12:18], state["qkv.key_weight"])


def test_octavos_own_state_still_loads():
    one, other = _layer(), _layer()
    other.load_state_dict(one.state_dict())
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_missing_tensors_are_named():
    state = _checkpoint()
    del state["self_attention.layernorm_qkv.key_weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*qkv\.linear\.weight"):
        _layer().load_state_dict(state)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_read_the_names_too(again):
    state, copied = _checkpoint(), again(_layer())
    copied.load_state_dict(state)
    assert torch.equal(copied.layer.mlp.fc1.weight, state["layernorm_mlp.fc1_weight"])
