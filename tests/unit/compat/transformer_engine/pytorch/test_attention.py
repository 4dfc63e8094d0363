"""Against explicit softmax in float64, the contract tests' oracle; layouts and masks as Transformer Engine has them."""

import pytest
import torch

from octavo.compat.transformer_engine.pytorch import DotProductAttention, MultiheadAttention
from octavo.errors import ConfigError
from tests.contract.transformer_oracle import (
    Shape,
    assert_close,
    attention,
    scores_to_values,
    seen,
    spread_out,
    turn,
    weights_of,
)

T, B, HEADS, D = 5, 2, 4, 6
HIDES_PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]).reshape(B, 1, 1, T)
HIDES_ANY = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(3)) > 0.6


def _visible(mask_type, window=None):
    """bool [B, T, T], position by position."""
    lengths = [5, 3] if "padding" in mask_type else [5, 5]
    rules = Shape(heads=HEADS, kv_heads=HEADS, causal="causal" in mask_type, window=window)
    table = seen(rules, lengths, T, T)
    return table & ~HIDES_ANY[:, 0] if mask_type == "arbitrary" else table


def _mask(mask_type):
    return HIDES_ANY if mask_type == "arbitrary" else HIDES_PADDING if "padding" in mask_type else None


MASK_TYPES = ["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding,causal", "arbitrary"]


@pytest.mark.parametrize("mask_type", MASK_TYPES)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_dot_product_attention(mask_type, layout, groups):
    q, k, v = torch.randn(B, T, HEADS, D), torch.randn(B, T, groups, D), torch.randn(B, T, groups, D)
    expected = scores_to_values(q.double(), k.double(), v.double(), visible=_visible(mask_type)).flatten(2)
    ours = DotProductAttention(HEADS, D, groups, qkv_format=layout, attn_mask_type=mask_type)
    swapped = [x.transpose(0, 1) for x in (q, k, v)] if layout == "sbhd" else (q, k, v)
    y = ours(*swapped, attention_mask=_mask(mask_type))
    assert_close(y.transpose(0, 1) if layout == "sbhd" else y, expected, relative=1e-5)


def test_a_call_may_ask_for_another_mask_window_and_layout():
    q, k, v = torch.randn(3, B, T, HEADS, D)
    expected = scores_to_values(q.double(), k.double(), v.double(), visible=_visible("no_mask", 1)).flatten(2)
    ours = DotProductAttention(HEADS, D)
    assert_close(
        ours(q, k, v, qkv_format="bshd", attn_mask_type="no_mask", window_size=(1, 1)), expected, relative=1e-5
    )


def test_causal_with_unlike_lengths_must_say_which_corner():
    q, kv = torch.randn(2, B, HEADS, D), torch.randn(T, B, HEADS, D)
    with pytest.raises(ConfigError, match="causal_bottom_right"):
        DotProductAttention(HEADS, D)(q, kv, kv)
    y = DotProductAttention(HEADS, D, attn_mask_type="causal_bottom_right")(q, kv, kv)
    exact = [x.transpose(0, 1).double() for x in (q, kv, kv)]
    rules = Shape(heads=HEADS, kv_heads=HEADS)
    expected = scores_to_values(*exact, visible=seen(rules, [T, T], 2, T)).flatten(2)
    assert_close(y.transpose(0, 1), expected, relative=1e-5)


def test_dropout_is_for_training():
    ours = DotProductAttention(HEADS, D, attention_dropout=0.5)
    q, k, v = torch.randn(3, T, B, HEADS, D)
    assert not torch.equal(ours(q, k, v), ours(q, k, v))
    ours.eval()
    assert torch.equal(ours(q, k, v), ours(q, k, v))


def _attention(**options):
    made = MultiheadAttention(24, HEADS, attention_dropout=0.0, **options)
    spread_out(made)
    return made


@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_multihead_attention(mask_type):
    ours = _attention(attn_mask_type=mask_type, num_gqa_groups=2, input_layernorm=True, layernorm_epsilon=1e-3)
    x = torch.randn(T, B, 24)
    shape = Shape(heads=HEADS, kv_heads=2, eps=1e-3)
    exact = x.transpose(0, 1).double()
    expected = attention(weights_of(ours), "attention.", exact, shape, visible=_visible(mask_type))
    y = ours(x, attention_mask=_mask(mask_type))
    assert_close(y.transpose(0, 1), expected, relative=1e-5)


def test_cross_attention():
    ours = _attention(attention_type="cross", attn_mask_type="padding", qkv_format="bshd")
    x, memory = torch.randn(B, 3, 24), torch.randn(B, T, 24)
    y = ours(x, encoder_output=memory, attention_mask=(HIDES_PADDING[..., :3], HIDES_PADDING))
    visible = seen(Shape(heads=HEADS, kv_heads=HEADS, causal=False), [5, 3], 3, T)
    shape = Shape(heads=HEADS, kv_heads=HEADS)
    expected = attention(weights_of(ours), "attention.", x.double(), shape, visible=visible, memory=memory.double())
    assert_close(y, expected, relative=1e-5)


def test_angles_turn_queries_and_keys():
    ours, x = _attention(), torch.randn(T, B, 24)
    angles = torch.outer(torch.arange(T).float(), 50.0 ** (-torch.arange(3).float() / 3))
    emb = torch.cat((angles, angles), dim=-1)[:, None, None]
    y = ours(x, rotary_pos_emb=emb)
    assert torch.equal(y, ours(x, rotary_pos_emb=(emb, emb)))
    weights, exact = weights_of(ours), x.transpose(0, 1).double()
    qkv = exact @ weights["attention.qkv.linear.weight"].T + weights["attention.qkv.linear.bias"]
    q, k, v = (part.unflatten(-1, (HEADS, D)) for part in qkv.chunk(3, dim=-1))
    attended = scores_to_values(turn(q, 50.0), turn(k, 50.0), v, visible=_visible("causal")).flatten(2)
    expected = attended @ weights["attention.out.weight"].T + weights["attention.out.bias"]
    assert_close(y.transpose(0, 1), expected, relative=1e-5)
    with pytest.raises(ConfigError, match="by the same angles"):
        ours(x, rotary_pos_emb=(emb, emb.clone()))


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"qkv_format": "thd"}, None),
        ({"attention_type": "both"}, None),
        ({"attn_mask_type": "triangle"}, None),
        ({"return_layernorm_output": True}, None),
        ({"qk_norm_type": "RMSNorm"}, None),
        ({}, {"attn_mask_type": "no_mask"}),
        ({}, {"window_size": (2, 0)}),
    ],
)
def test_unsupported_values_are_refused(options, call):
    if call is None:
        with pytest.raises(ConfigError, match=next(iter(options.values())).__str__()):
            MultiheadAttention(24, HEADS, **options)
    else:
        with pytest.raises(ConfigError, match="constructor"):
            MultiheadAttention(24, HEADS, **options)(torch.randn(T, B, 24), **call)
