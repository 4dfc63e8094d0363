"""The definition of a decoder, against torch's attention and against arithmetic in float64."""

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo.formats import E4M3
from octavo.inference import reference
from octavo.inference.decoder_weights import DecoderWeight, InputCast, Saturation
from octavo.numerics.integers import quantize_int8


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_matches_torch(heads, kv_heads):
    length, dim = 9, 16
    keys, values = torch.randn(2, length, kv_heads, dim)
    position = torch.tensor([0, 3, 8, 3])
    queries = torch.randn(len(position), heads, dim)
    seen = torch.arange(length) <= position[:, None]
    q, k, v = (x.double().transpose(0, 1) for x in (queries, keys, values))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(reference.attend(queries, keys, values, position, 0.3), wanted.transpose(0, 1).float())


def test_linear_matches_dequantized_weights():
    weight = octavo.quantize(torch.randn(5, 12), E4M3, granularity=octavo.PerRow())
    x, bias = torch.randn(3, 12), torch.randn(5)
    wanted = x.double() @ (weight.data.double() * weight.scale.double()).t()
    found = reference.linear(x, DecoderWeight(rows=weight), Saturation())
    torch.testing.assert_close(found, wanted.float())
    found = reference.linear(x, DecoderWeight(rows=weight, bias=bias), Saturation())
    torch.testing.assert_close(found, (wanted + bias).float())


def test_int8_linear_matches_integer_product():
    rows, x = quantize_int8(torch.randn(5, 12)), torch.randn(3, 12)
    own = quantize_int8(x)
    exact = (own.data.long() @ rows.data.long().t()).double() * own.scale.double() * rows.scale.double().t()
    weight = DecoderWeight(rows=rows, input=InputCast.INT8_DYNAMIC)
    torch.testing.assert_close(reference.linear(x, weight, Saturation()), exact.float())


def test_static_scale_counts_saturation():
    weight = octavo.quantize(torch.randn(5, 8), E4M3, granularity=octavo.PerRow())
    x = torch.tensor([[1.0, 231.0, -233.0, 300.0, torch.inf, 0.0, 224.0, -1.0]])  # 464 · 0.5 = 232 is clipped from on
    static = DecoderWeight(rows=weight, input=InputCast.E4M3_STATIC, input_scale=torch.tensor(0.5))
    saturation = Saturation()
    reference.linear(x, static, saturation)
    assert saturation == Saturation(elements=8, saturated=2)
