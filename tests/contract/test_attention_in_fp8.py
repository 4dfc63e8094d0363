"""Attention in FP8 against a loop over heads of linear layers, torch's attention, and the failures of other kernels."""

import math

import pytest
import torch
from torch.nn import functional as F

import octavo
from octavo import recipes
from octavo.errors import ConfigError
from octavo.functional import fp8_attention, fp8_linear
from octavo.nn import DotProductAttention, TransformerLayer
from octavo.nn.attention import attend
from octavo.numerics import sqnr_db

RECIPES = ("tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def tensors(dtype=torch.float32, *, batch=2, asked=5, known=7, heads=4, kv=2, width=24, of_value=16):
    torch.manual_seed(0)
    shapes = ((batch, asked, heads, width), (batch, known, kv, width), (batch, known, kv, of_value))
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return *leaves, torch.randn(batch, asked, heads, of_value).to(dtype)


def head_by_head(q, k, v, recipe, mask=None):
    """Two linear layers and a softmax for each sequence and key head."""
    group, outs = q.shape[2] // k.shape[2], []
    for b in range(len(q)):
        for h in range(k.shape[2]):
            rows = torch.cat([q[b, :, i] for i in range(h * group, (h + 1) * group)]).float()
            logits = fp8_linear(rows, k[b, :, h].contiguous(), None, recipe) * (1 / math.sqrt(q.shape[3]))
            if mask is not None:
                logits = logits.masked_fill(~mask.repeat(group, 1), -math.inf)
            out = fp8_linear(logits.softmax(-1), v[b, :, h].t().contiguous(), None, recipe)
            outs += out.to(q.dtype).split(q.shape[1])
    return torch.stack(outs).view(len(q), q.shape[2], q.shape[1], -1).transpose(1, 2)


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_outputs_and_gradients_are_those_of_linear_layers_for_each_head(recipe, dtype, causal):
    recipe, (q, k, v, grad) = recipes.get(recipe), tensors(dtype)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2) if causal else None
    y = attend(q, k, v, causal=causal, recipe=recipe)
    expected = head_by_head(q, k, v, recipe, mask)
    assert y.dtype is dtype
    assert torch.equal(y, expected)
    gradients, wanted = (torch.autograd.grad(each, (q, k, v), grad) for each in (y, expected))
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.equal(one, other)


@each_recipe
def test_numbers_are_near_torchs_in_high_precision(recipe):
    q, k, v, grad = tensors(asked=33, known=33, of_value=24)
    exact, y = (attend(q, k, v, causal=True, recipe=each) for each in (None, recipes.get(recipe)))
    assert 20 < sqnr_db(exact.detach(), y.detach()) < 60
    gradients = zip(torch.autograd.grad(exact, (q, k, v), grad), torch.autograd.grad(y, (q, k, v), grad), strict=True)
    assert min(sqnr_db(one, other) for one, other in gradients) > 15


def test_a_scale_is_one_for_each_sequence_and_key_head():
    q, k, v, _ = tensors()
    recipe = recipes.get("tensorwise")
    y = attend(q, k, v, causal=False, recipe=recipe)
    grown = q.detach().clone()
    grown[0, :, :2] *= 1000  # the query heads of one key head
    other = attend(grown, k, v, causal=False, recipe=recipe)
    assert torch.equal(y[0, :, 2:], other[0, :, 2:])
    assert torch.equal(y[1], other[1])
    assert not torch.equal(y[0, :, :2], other[0, :, :2])


@each_recipe
@pytest.mark.parametrize("as_floats", [False, True])
def test_hidden_keys_and_blind_queries_have_no_part_in_anything(recipe, as_floats):
    recipe, (q, k, v, grad) = recipes.get(recipe), tensors(batch=1)
    visible = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    visible[..., 5:] = visible[:, :, 4] = False
    mask = torch.zeros(visible.shape).masked_fill(~visible, -math.inf) if as_floats else visible
    with torch.no_grad():
        q[:, 4], k[:, 5:], v[:, 5:] = 1e6, float("nan"), float("inf")
    y = fp8_attention(q, k, v, recipe, mask=mask)
    y.backward(grad)
    assert not y[:, 4].any()
    for leaf, unseen in ((q, 4), (k, slice(5, None)), (v, slice(5, None))):
        assert leaf.grad is not None
        assert not leaf.grad[:, unseen].any()
    expected = fp8_attention(q[:, :4], k[:, :5], v[:, :5], recipe)
    assert torch.equal(y[:, :4], expected)


def test_a_floating_mask_is_added_and_gets_its_gradient():
    q, k, v, grad = tensors(of_value=24)
    bias = torch.randn(1, 4, 5, 7, requires_grad=True)
    found, exact = (attend(q, k, v, causal=False, mask=bias, recipe=each) for each in (recipes.get("rowwise"), None))
    pair = [torch.autograd.grad(y, bias, grad)[0] for y in (found, exact)]
    assert sqnr_db(pair[1], pair[0]) > 20


def scores_gradient(values, grad, recipe, logits):
    """Gradient of the logits, by a floating mask of them, and the output."""
    mask = logits.clone().requires_grad_()
    zeros = torch.zeros(1, logits.shape[-2], 1, 8), torch.zeros(1, logits.shape[-1], 1, 8)
    y = fp8_attention(*zeros, values, recipe, mask=mask)
    return torch.autograd.grad(y, mask, grad)[0][0, 0], y.detach()


def test_rows_of_the_scores_gradient_add_up_to_zero_where_those_of_a_rounded_output_have_one_sign():
    """arXiv 2510.04212: δ = Σ dO · O with O in BF16, whose rounding errors agree where values have like bits."""
    torch.manual_seed(0)
    odd = torch.randint(0, 16, (2, 16)) * 4 + torch.tensor([[1], [2]])  # sums of 3 mod 4: ties round up each time
    values = -(1 + odd.float() / 128)[None, :, None]  # [1, S, 1, V], exact in BF16
    grad = torch.rand(1, 32, 1, 16) + 0.5
    recipe = recipes.get("bf16")
    gradient, y = scores_gradient(values, grad, recipe, torch.zeros(1, 1, 32, 2))
    exact = torch.einsum("btv,bsv->ts", grad[:, :, 0], values[:, :, 0]) / 2
    delta = (grad * y.bfloat16().float()).sum(-1).view(-1, 1)
    as_flash = exact - delta / 2  # P (dP - δ) with P = 1 / 2
    assert (as_flash.sum(-1) > 1e-2).all()  # of one sign in every row
    assert (gradient.sum(-1).abs() < 1e-5).all()


@each_recipe
def test_rows_of_the_scores_gradient_add_up_to_zero_although_probabilities_as_codes_do_not_add_up_to_one(recipe):
    torch.manual_seed(0)
    logits, values, grad = torch.randn(1, 1, 32, 48), torch.randn(1, 48, 1, 16), torch.randn(1, 32, 1, 16)
    gradient, y = scores_gradient(values, grad, recipes.get(recipe), logits)
    magnitude = gradient.abs().sum(-1)
    assert (gradient.sum(-1).abs() < 1e-5 * magnitude).all()
    p, dp = logits[0, 0].softmax(-1), torch.einsum("btv,bsv->ts", grad[:, :, 0], values[:, :, 0])
    as_flash = p * (dp - (grad * y).sum(-1).view(-1, 1))
    assert (as_flash.sum(-1).abs() / magnitude).mean() > 1e-3


def test_it_is_off_unless_asked_for_and_autocast_switches_it_off():
    q, k, v, _ = tensors(of_value=24)
    plain, attention = DotProductAttention(causal=False), DotProductAttention(causal=False, recipe="rowwise")
    heads = [each.transpose(1, 2) for each in (q, k, v)]
    exact = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], enable_gqa=True)
    assert torch.equal(plain(q, k, v), exact.transpose(1, 2))
    assert not torch.equal(attention(q, k, v), plain(q, k, v))
    with octavo.autocast(enabled=False):
        assert torch.equal(attention(q, k, v), plain(q, k, v))
    with octavo.autocast("delayed"):  # which attention does not have: it keeps its own
        inside = attention(q, k, v)
    assert torch.equal(inside, attention(q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v).dtype is plain(q, k, v).dtype is torch.bfloat16


@pytest.mark.parametrize("recipe", ["delayed", "static"])
def test_scales_of_other_steps_are_refused(recipe):
    with pytest.raises(ConfigError, match="attention takes its scales from its tensors"):
        DotProductAttention(recipe=recipe)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"heads": 3}, r"a number of heads that divides theirs, not \(2, 5, 3, 24\), \(2, 7, 2, 24\)"),
        ({"kv": 0}, "a number of heads that divides theirs"),
        ({"asked": 0}, r"no size 0, not queries \(2, 0, 4, 24\) and keys \(2, 7, 2, 24\); octavo.nn.Dot"),
        ({"known": 0}, "no size 0"),
        ({"width": 0}, "no size 0"),
    ],
    ids=str,
)
def test_shapes_that_do_not_go_together_are_refused_in_one_sentence(sizes, words):
    q, k, v, _ = tensors(**sizes)
    with pytest.raises(ConfigError, match=words):
        fp8_attention(q, k, v, recipes.get("rowwise"))


def test_keys_of_another_width_are_refused_as_in_high_precision():
    (q, _, v, _), (_, k, _, _) = tensors(), tensors(width=16)
    with pytest.raises(ConfigError, match="with the queries' batch and width"):
        fp8_attention(q, k, v, recipes.get("rowwise"))


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)], ids=str)
def test_empty_tensors_give_what_high_precision_gives(shape):
    batch, asked, known = shape
    q, k, v, _ = tensors(batch=batch, asked=asked, known=known, of_value=24)
    found, exact = (attend(q, k, v, causal=False, recipe=each) for each in (recipes.get("tensorwise"), None))
    assert torch.equal(found, exact)


def test_a_layer_trains_with_it_under_checkpointing_as_without():
    layer = TransformerLayer(32, 64, 4, num_kv_heads=2, recipe="tensorwise", attention_recipe="tensorwise")
    assert layer.self_attention.attention.recipe is not None
    x = torch.randn(2, 9, 32, requires_grad=True)
    (once,) = torch.autograd.grad(layer(x).square().sum(), x)
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.square().sum(), x)[0], once)
