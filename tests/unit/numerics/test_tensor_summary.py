"""Summary of an FP8 tensor: its facts, and a histogram that counts every finite code once."""

import re

import pytest
import torch

from octavo import PerBlock, PerRow, QuantizedTensor, quantize
from octavo.formats import E4M3, E5M2, E8M0, FP8_FORMATS
from octavo.numerics import ScaleRounding
from octavo.numerics.code_counts import code_counts
from octavo.numerics.tensor_summary import code_bars


def facts(tensor) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", tensor._repr_html_()))


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_bars_count_every_finite_code_once(fmt):
    every = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype)
    bars = code_bars(code_counts(every), fmt)
    total = sum(int(count.replace(",", "")) for bar in bars for count in re.findall(r": ([\d,]+) code", bar.title))
    assert total == every.float().isfinite().sum()
    assert max(bar.height for bar in bars) == 1.0
    assert [bar.tick for bar in bars if bar.tick] == [f"−{fmt.max:,.0f}", "−1", "0", "1", f"{fmt.max:,.0f}"]


def test_facts_name_shape_scales_and_lost_values():
    x = torch.tensor([[0.0, 1.0, 2.0, 448.0], [0.0, float("nan"), 1.0, 896.0]])
    assert facts(quantize(x, E4M3, granularity=PerRow())) == {
        "shape": "2 × 4, decoded to float32",
        "scale": "2 scales, one per row, float32: 1 to 2, median 1",
        "memory": "16 bytes on cpu",
        "codes": "25.0 % zero, 25.0 % at ±448, 12.5 % NaN",
    }


def test_e8m0_scales_are_shown_as_numbers():
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    block, power = PerBlock(1, 32), ScaleRounding.RCEIL
    q = quantize(x, E4M3, granularity=block, scale_rounding=power, scale_format=E8M0)
    assert facts(q)["scale"] == "1 scale, one per 1×32 block, E8M0 bytes: 0.00391"


def test_tensors_without_values_are_shown_without_a_histogram():
    empty = quantize(torch.empty(0, 4), E5M2)
    meta = QuantizedTensor(empty.data.to("meta"), empty.scale.to("meta"), empty.granularity, torch.float32)
    for tensor in (empty, meta):
        assert "<rect" not in (tensor._repr_html_() or "<rect")
        assert "codes" not in facts(tensor)
