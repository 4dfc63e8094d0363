"""Inside the context a row's bits are those that it has alone; torch's own depend on its company."""

from threading import Thread

import pytest
import torch
import torch.nn.functional as F

from octavo.formats import E4M3
from octavo.kernels import quantize, scaled_mm
from octavo.kernels.each import scaled_mm_each
from octavo.kernels.row_by_row import RowByRow, is_row_by_row, rows_of
from octavo.nn.attention import attend
from octavo.numerics import PerBlock, PerRow, PerTensor

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT, BIAS = torch.randn(40, 75, generator=GENERATOR), torch.randn(40, generator=GENERATOR)
OPERATIONS = {
    "mm": lambda x: torch.mm(x, WEIGHT.t()),
    "addmm": lambda x: torch.addmm(BIAS, x, WEIGHT.t()),
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "silu": F.silu,
    "gelu": F.gelu,
    "cos": lambda x: x.cos(),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_bits_that_it_has_alone(name):
    compute, x = OPERATIONS[name], torch.randn(33, 75, generator=GENERATOR)
    with RowByRow():
        together = compute(x)
    assert torch.equal(together, torch.cat([compute(row) for row in x.split(1)]))
    torch.testing.assert_close(together, compute(x))


def test_a_rows_address_changes_no_bit():
    """Of odd widths, rows begin at any multiple of four bytes."""
    weight, x = torch.randn(3001, 769, generator=GENERATOR), torch.randn(9, 769, generator=GENERATOR)
    with RowByRow():
        together = F.linear(x, weight)
    assert torch.equal(together, torch.cat([F.linear(row.clone(), weight) for row in x.split(1)]))


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(1, 128), PerBlock(16, 64)], ids=str)
def test_sums_of_codes_have_the_bits_of_a_row_alone(granularity):
    weight = quantize(torch.randn(40, 384, generator=GENERATOR), E4M3, granularity=PerRow())
    codes = quantize(torch.randn(33, 384, generator=GENERATOR), E4M3, granularity=granularity)
    bias = torch.randn(40, generator=GENERATOR)
    expected = torch.cat([scaled_mm(row, weight, bias=bias) for row in rows_of(codes)])
    with RowByRow():
        assert torch.equal(scaled_mm(codes, weight, bias=bias), expected)
        assert is_row_by_row()
    assert not is_row_by_row()
    torch.testing.assert_close(scaled_mm(codes, weight, bias=bias), expected)


def test_sums_of_several_experts_have_the_bits_of_a_row_alone():
    weights = [quantize(torch.randn(40, 384, generator=GENERATOR), E4M3, granularity=PerRow()) for _ in range(2)]
    codes = [quantize(torch.randn(rows, 384, generator=GENERATOR), E4M3, granularity=PerRow()) for rows in (33, 5)]
    outs = [torch.empty(len(each.data), 40) for each in codes]
    with RowByRow():
        scaled_mm_each(codes, weights, outs)
    for rows, weight, out in zip(codes, weights, outs, strict=True):
        assert torch.equal(out, torch.cat([scaled_mm(row, weight) for row in rows_of(rows)]))


def test_the_context_is_of_one_thread():
    inside = []
    with RowByRow():
        thread = Thread(target=lambda: inside.append(is_row_by_row()))
        thread.start()
        thread.join()
    assert inside == [False]


def test_a_linear_layer_keeps_leading_dimensions():
    x = torch.randn(2, 3, 75, generator=GENERATOR)
    with RowByRow():
        assert F.linear(x, WEIGHT).shape == (2, 3, 40)
        assert F.linear(x[0, 0], WEIGHT).shape == (40,)
        assert F.linear(x[:0], WEIGHT).shape == (0, 3, 40)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_has_the_bits_of_decoding(dtype, kv_heads):
    queries = torch.randn(3, 37, 4, 16, generator=GENERATOR).to(dtype)
    keys, values = torch.randn(2, 3, 37, kv_heads, 16, generator=GENERATOR).to(dtype)
    with RowByRow():
        together = attend(queries, keys, values, causal=True)
        for text in range(3):
            own = [each[text : text + 1] for each in (queries, keys, values)]
            assert torch.equal(together[text : text + 1], attend(*own, causal=True))
            for end in range(1, 38):
                query, key, value = own[0][:, end - 1 : end], own[1][:, :end], own[2][:, :end]
                assert torch.equal(together[text : text + 1, end - 1 : end], attend(query, key, value, causal=True))
    torch.testing.assert_close(together, attend(queries, keys, values, causal=True))


def test_attention_with_a_mask_is_torchs():
    q, k, v = torch.randn(3, 1, 2, 5, 16, generator=GENERATOR)
    mask = torch.rand(5, 5, generator=GENERATOR) > 0.3
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    with RowByRow():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), expected)
