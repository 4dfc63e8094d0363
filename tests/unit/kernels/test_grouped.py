"""Products of experts as users call them: a loop on a CPU, checks, one operator in a graph."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
from octavo.errors import ConfigError
from octavo.kernels import scaled_grouped_mm, scaled_mm
from octavo.numerics import PerBlock, PerRow, PerTensor, QuantizedTensor
from octavo.numerics.granularity import granularity_as_list

SPLIT = torch.tensor([0, 3, 3, 8])


def _operands(granularity=None, other=None) -> tuple[QuantizedTensor, QuantizedTensor]:
    x, weights = torch.randn(8, 20), torch.randn(3, 6, 20)
    return octavo.quantize(x, octavo.E4M3, granularity=granularity), octavo.quantize(
        weights, octavo.E4M3, granularity=other or granularity
    )


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(1, 8)], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16], ids=str)
def test_each_row_is_multiplied_by_its_expert(granularity, out_dtype):
    x, weights = _operands(granularity)
    y = scaled_grouped_mm(x, weights, SPLIT, out_dtype=out_dtype)
    assert y.dtype is (out_dtype or torch.float32)
    exact = x.dequantize().double()[:, None] * weights.dequantize().double()[[0, 0, 0, 2, 2, 2, 2, 2]]
    torch.testing.assert_close(y.double(), exact.sum(-1), rtol=2**-8, atol=2**-16)
    wanted = scaled_mm(
        replace(x, data=x.data[3:], scale=x.scale if x.scale.ndim == 0 else x.scale[3:]),
        replace(weights, data=weights.data[2], scale=weights.scale if x.scale.ndim == 0 else weights.scale[2]),
        out_dtype=out_dtype,
    )
    torch.testing.assert_close(y[3:], wanted)


def test_a_scale_for_each_expert():
    x, weights = _operands(PerRow(), PerBlock(6, 20))
    assert weights.scale.shape == (3, 1, 1)
    y = scaled_grouped_mm(x, weights, SPLIT)
    torch.testing.assert_close(y[0], weights.dequantize()[0] @ x.dequantize()[0])


def test_no_rows_and_no_experts():
    x, weights = _operands()
    none = replace(x, data=x.data[:0])
    assert scaled_grouped_mm(none, weights, torch.zeros(4, dtype=torch.int32)).shape == (0, 6)
    assert scaled_grouped_mm(none, replace(weights, data=weights.data[:0]), torch.zeros(1).int()).shape == (0, 6)


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        (SPLIT.float(), r"offsets must be int32 or int64 of shape \(4,\), not torch.float32 \(4,\)"),
        (SPLIT[1:], r"offsets must be int32 or int64 of shape \(4,\), not torch.int64 \(3,\)"),
        (torch.tensor([0, 3, 2, 8]), r"offsets must rise from 0 to the 8 rows of a, not be \[0, 3, 2, 8\]"),
        (torch.tensor([1, 3, 3, 8]), "offsets must rise from 0"),
        (torch.tensor([0, 3, 3, 9]), "offsets must rise from 0"),
        (torch.empty(4, dtype=torch.int64, device="meta"), "offsets is on meta and a on cpu; move it there first"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value.device) + str(value.shape),
)
def test_bad_offsets_are_refused_in_one_sentence(offsets, reason):
    with pytest.raises(ConfigError, match=reason):
        scaled_grouped_mm(*_operands(), offsets)


def test_bad_operands_are_refused_in_one_sentence():
    x, weights = _operands()
    with pytest.raises(ConfigError, match=r"multiplies a \[T, K\] and b \[E, N, K\], not \(3, 6, 20\) and \(8, 20\)"):
        scaled_grouped_mm(weights, x, SPLIT)
    with pytest.raises(ConfigError, match=r"rows of different experts share no scale; quantize a per row, not PerB"):
        scaled_grouped_mm(_operands(PerBlock(4, 8))[0], weights, SPLIT)
    with pytest.raises(ConfigError, match="out_dtype must be bfloat16, float16 or float32"):
        scaled_grouped_mm(x, weights, SPLIT, out_dtype=torch.int8)
    with pytest.raises(ConfigError, match="b must be a QuantizedTensor, not Tensor"):
        scaled_grouped_mm(x, weights.data, SPLIT)  # type: ignore[arg-type]


def test_a_graph_has_one_operator():
    with FakeTensorMode():
        x, weights = (torch.empty(s, dtype=torch.float8_e4m3fn) for s in ((8, 20), (3, 6, 20)))
        a, b = (QuantizedTensor(q, torch.empty(*q.shape[:-1], 1), PerRow(), torch.bfloat16) for q in (x, weights))
        y = scaled_grouped_mm(a, b, torch.empty(4, dtype=torch.int64))
        assert (y.shape, y.dtype) == ((8, 6), torch.bfloat16)


def test_the_operator_is_what_its_shape_function_says():
    x, weights = _operands(PerRow())
    rows = granularity_as_list(PerRow())
    arguments = (x.data, x.scale, rows, weights.data, weights.scale, rows, SPLIT, torch.bfloat16)
    torch.library.opcheck(torch.ops.octavo.grouped_mm, arguments, test_utils=("test_faketensor",))
