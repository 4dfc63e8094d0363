"""Products of few rows against FP64: every kind of row, weight and end, and rows beside each other."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import BackendError
from octavo.formats import E4M3, E5M2
from octavo.kernels.triton.few_rows import few_rows, rms_norm
from octavo.numerics import PerBlock, PerRow, PerTensor, QuantizedTensor, quantize

UNIT = 2.0**-23  # of FP32
UNIT_BF16 = 2.0**-8


def weight(rows, columns, device, granularity=None):
    made = quantize(torch.randn(rows, columns), E4M3, granularity=granularity or PerRow())
    return QuantizedTensor(made.data.to(device), made.scale.to(device), made.granularity, torch.float32)


def exact(x, w, bias=None, residual=None, *, gated=False):
    """In FP64, and the sum of magnitudes that rounding errors are relative to."""
    wide, own = w.dequantize().double().cpu(), x.double().cpu()
    y, size = own @ wide.T, own.abs() @ wide.abs().T
    if gated:
        (first, second), (size, other) = y.chunk(2, dim=1), size.chunk(2, dim=1)
        # silu's slope is at most 1.1, and its value at most the number's
        y, size = F.silu(first) * second, 1.1 * size * second.abs() + first.abs() * other
    for more in (bias, residual):
        if more is not None:
            y, size = y + more.double().cpu(), size + more.double().cpu().abs()
    return y, size


def check(found, expected, columns, unit=UNIT):
    """Sums of ``columns`` products in any order, and a few operations after them."""
    wanted, size = expected
    bound = (columns + 8) * UNIT * size + unit * size
    assert bool(((found.double().cpu() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64])
@pytest.mark.parametrize(("outputs", "columns"), [(3, 5), (48, 128), (70, 144), (24, 1040)])
@pytest.mark.parametrize("gated", [False, True])
def test_sums_are_fp32(rows, outputs, columns, gated, device):
    w = weight(2 * outputs, columns, device)
    x = torch.randn(rows, columns, device=device)
    unit = UNIT if rows == 1 else 2.0**-16  # what two parts of bfloat16 leave
    check(few_rows(x, w, gated=gated), exact(x, w, gated=gated), columns, unit=unit)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=str)
def test_bfloat16_rows_are_taken_as_they_are(rows, granularity, device):
    w, x = weight(40, 200, device, granularity), torch.randn(rows, 200, device=device).bfloat16()
    check(few_rows(x, w), exact(x, w), 200)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_added_meets_the_sum(rows, gated, device):
    w, x = weight(60, 100, device), torch.randn(rows, 100, device=device)
    outputs = 30 if gated else 60
    bias, residual = torch.randn(outputs, device=device), torch.randn(rows, outputs, device=device)
    wanted = exact(x, w, bias, residual, gated=gated)
    check(few_rows(x, w, gated=gated, bias=bias, residual=residual), wanted, 100, unit=2.0**-16)
    assert few_rows(x, w, gated=gated, bias=bias, residual=residual, out=residual) is residual
    check(residual, wanted, 100, unit=2.0**-16)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("columns", [72, 1030])
def test_a_norm_comes_first(rows, columns, device):
    w, x = weight(40, columns, device), 3 * torch.randn(rows, columns, device=device)
    norm = torch.randn(columns, device=device)
    normed = F.rms_norm(x.double(), (columns,), norm.double(), 0.5)
    found = few_rows(x, w, norm=norm, eps=0.5)
    check(found, exact(normed, w), columns, unit=4 * UNIT if rows == 1 else UNIT_BF16)
    rounded = rms_norm(x, norm, 0.5)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), normed, rtol=UNIT_BF16 * 1.01, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 4])
def test_results_are_rounded_once(rows, device):
    w, x = weight(48, 64, device), torch.randn(rows, 64, device=device)
    found = few_rows(x, w, out_dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float().cpu(), few_rows(x, w).cpu().bfloat16().float())


def test_rows_do_not_touch_each_other(device):
    w, x = weight(48, 160, device), torch.randn(16, 160, device=device)
    together = few_rows(x, w)
    assert torch.equal(few_rows(x[:7].contiguous(), w), together[:7])
    x[3] = float("nan")
    spoiled = few_rows(x, w)
    assert bool(spoiled[3].isnan().all())
    others = torch.arange(16) != 3
    assert torch.equal(spoiled[others], together[others])


def test_gates_beyond_what_exp_reaches(device):
    w = QuantizedTensor(
        torch.tensor([[0x7E], [0xFE], [0x38], [0x38]], dtype=torch.uint8).view(E4M3.torch_dtype).to(device),
        torch.ones(4, 1, device=device), PerRow(), torch.float32,
    )  # fmt: skip
    found = few_rows(torch.full((1, 1), 4.0, device=device), w, gated=True)
    assert found.cpu().tolist() == [[448 * 16, 0]]


def test_what_does_not_fit_is_refused(device):
    w, x = weight(32, 64, device), torch.randn(2, 64, device=device)
    for rows in (x[:0], torch.randn(65, 64, device=device), x.half(), x.t().contiguous().t(), torch.randn(64)):
        with pytest.raises(BackendError, match="1 to 64 contiguous rows"):
            few_rows(rows, w)
    blocks = quantize(torch.randn(32, 64), E4M3, granularity=PerBlock(32, 32))
    other = quantize(torch.randn(32, 64), E5M2, granularity=PerRow())
    for codes in (blocks, other, weight(32, 63, device)):
        with pytest.raises(BackendError, match="needs contiguous E4M3 codes"):
            few_rows(x, codes)
    with pytest.raises(BackendError, match="N even"):
        few_rows(x, weight(33, 64, device), gated=True)


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=str)
def test_a_traced_product_is_one_operator(granularity, device):
    w, x = weight(32, 48, device, granularity), torch.randn(2, 48, device=device)
    options: dict[str, Any] = {
        "norm": torch.ones(48, device=device),
        "residual": torch.ones(2, 16, device=device),
        "gated": True,
    }
    traced = torch.compile(lambda x: few_rows(x, w, **options), backend="eager", fullgraph=True)
    assert torch.equal(traced(x), few_rows(x, w, **options))
    arguments = (x, w.data, w.scale, None, 0.0, None, None, False, torch.bfloat16)
    torch.library.opcheck(torch.ops.octavo.few_rows.default, arguments, test_utils="test_faketensor")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("outputs", "columns"), [(4096, 14336), (28672, 4096), (576, 1536), (128256, 4096)])
def test_sizes_of_real_models(rows, outputs, columns, device):
    w = QuantizedTensor(
        torch.randint(0, 120, (outputs, columns), dtype=torch.uint8, device=device).view(E4M3.torch_dtype),
        torch.rand(outputs, 1, device=device) + 0.5, PerRow(), torch.float32,
    )  # fmt: skip
    x = torch.randn(rows, columns, device=device).bfloat16()
    wide = w.dequantize().double()
    bound = columns * UNIT * (x.double().abs() @ wide.abs().T)
    assert bool(((few_rows(x, w).double() - x.double() @ wide.T).abs() <= bound).all())
