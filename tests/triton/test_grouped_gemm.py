"""Products of experts by the kernel against a product for each: any split of the rows, empty experts, every scale."""

from itertools import pairwise

import pytest
import torch

import octavo
from octavo.formats import E4M3
from octavo.kernels import scaled_grouped_mm
from octavo.kernels.grouped import _part
from octavo.kernels.triton import gemm
from octavo.kernels.triton.grouped_gemm import grouped_product
from octavo.numerics import Granularity, PerBlock, PerRow, PerTensor, QuantizedTensor
from tests.triton.test_gemm import assert_right, each_tile, operand

N, K = 150, 300
PAIRS: list[tuple[Granularity, Granularity]] = [
    (PerBlock(1, 128), PerBlock(128, 128)),
    (PerBlock(1, 128), PerBlock(1, 128)),
    (PerRow(), PerRow()),
    (PerRow(), PerBlock(N, K)),
    (PerTensor(), PerTensor()),
]
SPLITS = [(0, 70, 70, 73, 200), (0, 0, 0, 0, 64), (0, 129, 193, 321, 321), (0, 0, 0, 0, 0)]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")


def stack(experts: int, n: int, k: int, granularity: Granularity, device: torch.device) -> QuantizedTensor:
    if isinstance(granularity, PerTensor):
        return octavo.quantize(torch.randn(experts, n, k, device=device), E4M3)
    each = [operand(n, k, granularity, device) for _ in range(experts)]
    data, scale = (torch.stack([getattr(q, name) for q in each]) for name in ("data", "scale"))
    return QuantizedTensor(data, scale, granularity, torch.float32)


def assert_each_right(y: torch.Tensor, x: QuantizedTensor, weights: QuantizedTensor, split: tuple[int, ...]) -> None:
    for expert, (start, end) in enumerate(pairwise(split)):
        if start < end:
            assert_right(y[start:end], _part(x, slice(start, end)), _part(weights, expert), None)


@pytest.mark.long
@each_pair
@each_tile
def test_every_row_meets_its_own_expert(pair, tile, device, monkeypatch):
    """Programs take tiles in turn, so that one which wrote beyond its expert's rows would spoil what is finished."""
    monkeypatch.setattr(gemm, "TILES", (tile,))
    weights = stack(4, N, K, pair[1], device)
    for split, dtype in zip(SPLITS[:3], (torch.int32, torch.int64, torch.int32), strict=True):
        x = operand(split[-1], K, pair[0], device)
        y = grouped_product(x, weights, torch.tensor(split, dtype=dtype, device=device), torch.float32)
        assert_each_right(y, x, weights, split)


def test_one_expert(device):
    x, weights = operand(20, 40, PerRow(), device), stack(1, 30, 40, PerRow(), device)
    y = grouped_product(x, weights, torch.tensor([0, 20], device=device), torch.float32)
    assert_each_right(y, x, weights, (0, 20))


@pytest.mark.parametrize("size", [(1, 1), (1, 15), (2, 1)], ids=str)
def test_one_expert_of_hardly_anything(size, device):
    n, k = size
    x, weights = operand(3, k, PerRow(), device), stack(1, n, k, PerRow(), device)
    y = grouped_product(x, weights, torch.tensor([0, 3], device=device), torch.float32)
    assert_each_right(y, x, weights, (0, 3))


def test_the_gradient_of_x_is_the_product_with_transposed_weights(device):
    split = (0, 30, 30, 90)
    weights = octavo.quantize(torch.randn(3, 40, 50, device=device), E4M3)
    transposed = QuantizedTensor(weights.data.transpose(1, 2), weights.scale, PerTensor(), torch.float32)
    gradient = operand(90, 40, PerRow(), device)
    y = grouped_product(gradient, transposed, torch.tensor(split, device=device), torch.bfloat16)
    assert_each_right(y, gradient, transposed, split)


@pytest.mark.gpu
@each_pair
def test_many_experts_on_a_gpu(pair, device):
    split = (0, *torch.randint(0, 4000, (63,)).sort().values.tolist(), 4000)
    weights, x = stack(64, N, K, pair[1], device), operand(4000, K, pair[0], device)
    offsets = torch.tensor(split, dtype=torch.int32, device=device)
    y = scaled_grouped_mm(x, weights, offsets, out_dtype=torch.bfloat16)
    assert_each_right(y, x, weights, split)


@pytest.mark.gpu
def test_experts_can_be_captured_and_compiled(device):
    weights, x = stack(4, N, K, PerRow(), device), operand(200, K, PerRow(), device)
    offsets = torch.tensor((0, 70, 70, 73, 200), dtype=torch.int32, device=device)
    wanted = scaled_grouped_mm(x, weights, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scaled_grouped_mm(x, weights, offsets)
    offsets.copy_(torch.tensor((0, 10, 20, 200, 200)))
    graph.replay()
    assert_each_right(y, x, weights, (0, 10, 20, 200, 200))
    offsets.copy_(torch.tensor((0, 70, 70, 73, 200)))
    compiled = torch.compile(lambda *given: scaled_grouped_mm(*given), fullgraph=True)
    assert torch.equal(compiled(x, weights, offsets), wanted)
