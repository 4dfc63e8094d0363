"""The definition of a decoder, against torch's attention and against arithmetic in float64."""

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo.formats import E4M3
from octavo.serving import layers


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_is_torchs_with_a_mask_by_position(heads, kv_heads):
    length, dim = 9, 16
    keys, values = torch.randn(2, length, kv_heads, dim)
    position = torch.tensor([0, 3, 8, 3])
    queries = torch.randn(len(position), heads, dim)
    seen = torch.arange(length) <= position[:, None]
    q, k, v = (x.double().transpose(0, 1) for x in (queries, keys, values))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(layers.attend(queries, keys, values, position, 0.3), wanted.transpose(0, 1).float())


def test_a_linear_multiplies_what_the_codes_decode_to():
    weight = octavo.quantize(torch.randn(5, 12), E4M3, granularity=octavo.PerRow())
    x = torch.randn(3, 12)
    wanted = x.double() @ (weight.data.double() * weight.scale.double()).t()
    torch.testing.assert_close(layers.linear(x, weight), wanted.float())
