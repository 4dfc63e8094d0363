"""Products by the kernel against their definition: every pair of scales, ragged shapes, every output dtype.

In the interpreter a block's sum is an FP32 sum, and the product is held to the bound of one. A tensor core's sums are
octavo.numerics' model of them to the bit: on a GPU only what is done to them afterwards may differ, and that is FP32.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, E8M0
from octavo.kernels.triton import gemm
from octavo.numerics import (
    Accumulate,
    Granularity,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    ScaleRounding,
    hopper_sums,
    quantize,
)
from octavo.numerics.accumulate import CHAIN
from tests.contract.gemm_oracle import assert_product

PAIRS: list[tuple[Granularity, Granularity]] = [
    (PerBlock(1, 128), PerBlock(128, 128)),
    (PerBlock(1, 128), PerBlock(1, 128)),
    (PerBlock(128, 128), PerBlock(1, 128)),
    (PerBlock(1, 32), PerBlock(1, 32)),
    (PerBlock(1, 64), PerBlock(48, 64)),
    (PerRow(), PerBlock(1, 64)),
    (PerBlock(1, 128), PerTensor()),
    (PerBlock(1, 128), PerRow()),
    (PerRow(), PerRow()),
    (PerTensor(), PerTensor()),
    (PerRow(), PerTensor()),
]
SHAPES = [(5, 7, 300), (70, 130, 129), (1, 1, 1), (3, 2, 32), (140, 9, 200)]
FP32_UNIT = 2.0**-24
each_tile = pytest.mark.parametrize("tile", gemm.TILES, ids=lambda tile: f"{tile.halves}x{tile.rows}x{tile.columns}")
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")


def operand(rows: int, k: int, granularity: Granularity, device: torch.device, fmt=E4M3) -> QuantizedTensor:
    """Numbers whose size changes from place to place, so that a scale in the wrong place shows."""
    x = (
        torch.randn(rows, k)
        * torch.exp2(torch.randint(-4, 5, (rows, k // 32 + 1)).float()).repeat_interleave(32, 1)[:, :k]
    )
    if granularity == PerBlock(1, 32):
        return quantize(
            x.to(device), fmt, granularity=granularity, scale_rounding=ScaleRounding.RCEIL, scale_format=E8M0
        )
    return quantize(x.to(device), fmt, granularity=granularity)


def assert_right(y: Tensor, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> None:
    if not y.is_cuda:
        assert_product(y, a, b, bias)
        return
    block, _ = gemm.block_width((a.granularity, b.granularity), a.shape[1])
    left, right = (q.granularity.expand(q.fp32_scale.double(), q.shape).expand(q.shape) for q in (a, b))
    exact, size = torch.zeros(2, *y.shape, dtype=torch.float64, device=y.device)
    for at in range(0, a.shape[1], block):
        part = slice(at, at + block)
        sums = hopper_sums(a.data[:, part], b.data[:, part], accumulate=Accumulate.HOPPER_FAST).double()
        scaled = sums * left[:, at, None] * right[:, at]
        exact += scaled
        size += scaled.abs()
    if bias is not None:
        exact += bias.double()
    info = torch.finfo(y.dtype)
    additions = -(-a.shape[1] // block) + 3
    allowed = additions * FP32_UNIT * (size + exact.abs()) + (exact.abs() * info.eps / 2).clamp(
        min=info.smallest_normal
    )
    within = exact.abs() < info.max
    assert ((y.double() - exact).abs() <= allowed)[within].all()


@each_pair
@each_tile
def test_ragged_shapes(pair, tile, device, monkeypatch):
    if tile.halves == 2 and gemm.block_width(pair, 10**6)[0] != CHAIN:
        pytest.skip("narrow blocks have no tiles of two halves")
    monkeypatch.setattr(gemm, "TILES", (tile,))
    for m, n, k in SHAPES:
        a, b = operand(m, k, pair[0], device), operand(n, k, pair[1], device)
        assert_right(gemm.product(a, b, None, torch.float32), a, b, None)


@each_pair
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_output_dtypes_with_a_bias(pair, out_dtype, device):
    a, b = operand(40, 160, pair[0], device), operand(70, 160, pair[1], device)
    for bias_dtype in (torch.float32, torch.bfloat16):
        bias = torch.randn(70, device=device).to(bias_dtype)
        y = gemm.product(a, b, bias, out_dtype)
        assert y.dtype is out_dtype
        assert_right(y, a, b, bias)


@pytest.mark.parametrize("formats", [*itertools.product((E4M3, E5M2), repeat=2)], ids=str)
def test_every_pair_of_formats(formats, device):
    for pair in PAIRS[:2]:
        a, b = (operand(rows, 200, g, device, fmt) for rows, g, fmt in zip((20, 30), pair, formats, strict=True))
        assert_right(gemm.product(a, b, None, torch.float32), a, b, None)


def test_every_e8m0_scale(device):
    """2^-127 is subnormal, and byte 255 is NaN."""
    every = torch.arange(256, dtype=torch.uint8, device=device)[:, None].repeat(1, 2)
    codes = torch.zeros(256, 33, device=device)
    codes[:, 32] = 1.0
    a = QuantizedTensor(codes.to(E4M3.torch_dtype), every, PerBlock(1, 32), torch.float32)
    one = replace(a, data=a.data[:1], scale=every[127:128])
    y = gemm.product(a, one, None, torch.float32)
    torch.testing.assert_close(y, a.fp32_scale[:, :1], rtol=0, atol=0, equal_nan=True)


def test_programs_take_one_tile_after_another_in_groups(device):
    """More tiles than programs, and more rows of them than are worked on together."""
    m, n = 64 * 19, 128 * 3
    rows = torch.arange(m, device=device) % 200 / 8
    a = QuantizedTensor(
        torch.ones(m, 16, device=device).to(E4M3.torch_dtype), rows[:, None].contiguous(), PerRow(), torch.float32
    )
    b = QuantizedTensor(
        torch.ones(n, 16, device=device).to(E4M3.torch_dtype),
        torch.arange(n, device=device)[:, None] / 4,
        PerRow(),
        torch.float32,
    )
    assert torch.equal(gemm.product(a, b, None, torch.float32), 16 * a.scale * b.scale.t())


def test_operands_in_any_layout(device):
    a, b = operand(48, 130, PerTensor(), device), operand(20, 130, PerTensor(), device)
    wanted = gemm.product(a, b, None, torch.float32)
    wide = torch.zeros(48, 160, dtype=torch.uint8, device=device)
    wide[:, 16:146] = a.data.view(torch.uint8)
    for data in (
        a.data.view(torch.uint8).t().contiguous().t(), wide[:, 16:146], wide[:, 15:].clone()[:, 1:131],
    ):  # fmt: skip
        other = replace(a, data=data.view(E4M3.torch_dtype))
        assert torch.equal(gemm.product(other, b, None, torch.float32), wanted)
        assert_right(gemm.product(b, other, None, torch.float32), b, other, None)


def test_codes_are_copied_where_their_layout_cannot_be_fetched():
    codes = torch.zeros(6, 64, dtype=torch.uint8)
    for view in (codes, codes[:, :20], codes[2:], codes[:, 16:], codes.reshape(2, 3, 64)):
        assert gemm.k_major(view) is view
    for view in (
        codes.t(),
        codes[:, 1:],
        codes[:, :63].contiguous(),
        codes.reshape(2, 3, 64)[:, :2],
        torch.zeros(16, 1).t(),
    ):
        copy = gemm.k_major(view)
        assert copy.data_ptr() != view.data_ptr()
        assert copy.data_ptr() % 16 == copy.stride(-2) % 16 == 0
        assert copy.stride(-1) == 1
        assert torch.equal(copy, view)
        assert gemm.k_major(copy) is copy


def test_scales_of_columns_lie_side_by_side_in_whole_tiles():
    """A kernel reads them without a mask."""
    for granularity, groups in ((PerBlock(1, 32), 256), (PerBlock(48, 32), 6), (PerRow(), 256)):
        q = operand(150, 70, granularity, torch.device("cpu"))
        found = gemm.Scales.of(q).columnwise(150, 128)
        held, blocks = q.scale.shape
        assert (found.values.shape, found.stride_row) == ((blocks, groups), 1)
        assert torch.equal(found.values[:, :held], q.scale.t())
        assert found.stride_block == (groups if blocks > 1 else 0)
        again = gemm.Scales(found.values.t(), found.rows, 0, 1, groups)
        assert again.columnwise(150, 128) is again
    whole = gemm.Scales.of(operand(150, 70, PerBlock(128, 32), torch.device("cpu")))
    assert whole.columnwise(150, 128) is whole


def test_the_cheapest_tile_is_taken(monkeypatch, device):
    monkeypatch.setattr(gemm, "programs", lambda _: 132)
    largest, middle, smallest = gemm.TILES
    assert gemm.choose_tile(4096, 4096, device, 128) == (largest, 132)
    assert gemm.choose_tile(1024, 2048, device, 128) == (middle, 128)
    assert gemm.choose_tile(16, 512, device, 128) == (smallest, 4)
    assert gemm.choose_tile(4096, 4096, device, 32) == (middle, 132)
    assert gemm.choose_tile(1024, 4096, device, 128)[0] == largest
    assert gemm.choose_tile(1024, 4096, device, 128, groups=64)[0] == smallest, "experts of 16 rows"


def test_scales_that_do_not_change_along_k_wait_for_the_end():
    assert gemm.block_width((PerBlock(1, 128), PerBlock(128, 128)), 128) == (CHAIN, False)
    assert gemm.block_width((PerBlock(1, 128), PerBlock(128, 128)), 129) == (CHAIN, True)


@pytest.mark.gpu
@each_pair
def test_large_products_on_a_gpu(pair, device):
    for m, n, k in ((700, 600, 4100), (1024, 768, 2048), (4000, 3000, 256)):
        a, b = operand(m, k, pair[0], device), operand(n, k, pair[1], device, E5M2)
        assert_right(gemm.product(a, b, None, torch.bfloat16), a, b, None)


@pytest.mark.gpu
def test_special_codes_on_a_gpu(device):
    for pair in PAIRS[:2]:
        a, b = operand(70, 300, pair[0], device), operand(80, 300, pair[1], device)
        a.data.view(torch.uint8)[3, 200] = 0x7F
        y = gemm.product(a, b, None, torch.float32)
        assert y[3].isnan().all()
        assert y[torch.arange(70, device=device) != 3].isfinite().all()


@pytest.mark.gpu
def test_a_product_can_be_captured_and_compiled(device):
    import octavo

    a, b = operand(256, 512, PAIRS[0][0], device), operand(384, 512, PAIRS[0][1], device)
    wanted = octavo.scaled_mm(a, b, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = octavo.scaled_mm(a, b, backend="triton")
    y.zero_()
    graph.replay()
    assert torch.equal(y, wanted)
    compiled = torch.compile(lambda left, right: octavo.scaled_mm(left, right), fullgraph=True)
    assert torch.equal(compiled(a, b), wanted)
