"""Products of several problems in one launch against a launch for each, bit for bit; and how many launches that is."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo import recipes
from octavo.errors import BackendError
from octavo.formats import E5M2
from octavo.functional import fp8_grouped_linear
from octavo.kernels import each
from octavo.kernels.triton import gemm, gemm_each, launching
from octavo.nn import GroupedLinear
from octavo.numerics import PerBlock, PerRow, PerTensor, QuantizedTensor
from tests.contract.test_experts import RECIPES, SPLITS, each_recipe, results, tensors
from tests.triton.test_gemm import each_pair, operand

Problems = tuple[list[QuantizedTensor], list[QuantizedTensor]]
RAGGED = {  # (M, N, K) of each problem
    "rows": [(5, 7, 200), (1, 7, 200), (70, 7, 200)],
    "K": [(30, 140, k) for k in (1, 17, 128, 200, 16)],
    "everything": [(1, 1, 1), (70, 130, 129), (3, 2, 32)],
}


@pytest.fixture
def one_tile(monkeypatch: pytest.MonkeyPatch) -> Callable[[gemm.Tile], None]:
    """Tiles of one kind, since NumPy's sums depend on a tile's shape, as a tensor core's do not."""

    def choose(tile: gemm.Tile) -> None:
        for module in (gemm, gemm_each):
            monkeypatch.setattr(module, "TILES", (tile,))

    return choose


@contextmanager
def counted() -> Iterator[Counter]:
    """How often each kernel is launched."""
    launch, launches = launching.launch, Counter[str]()

    def count(kernel, *arguments, **constants) -> None:
        launches[kernel.fn.__name__] += 1
        launch(kernel, *arguments, **constants)

    launching.launch = count
    try:
        yield launches
    finally:
        launching.launch = launch


def multiply_each(problems: Problems, biases: list[Tensor] | None, dtype: torch.dtype) -> list[Tensor]:
    a, b = problems
    outs = [
        torch.empty(len(left.data), len(right.data), dtype=dtype, device=left.data.device)
        for left, right in zip(a, b, strict=True)
    ]
    gemm_each.product_each(a, b, outs, biases)
    return outs


def assert_as_one_by_one(problems: Problems, biases: list[Tensor] | None = None, dtype=torch.float32) -> None:
    together = multiply_each(problems, biases, dtype)
    for number, (left, right, y) in enumerate(zip(*problems, together, strict=True)):
        assert torch.equal(y, gemm.product(left, right, None if biases is None else biases[number], dtype))


def problems_of(sizes, pair, device: torch.device) -> Problems:
    a = [operand(m, k, pair[0], device) for m, _, k in sizes]
    return a, [operand(n, k, pair[1], device, E5M2) for _, n, k in sizes]


@each_pair
@pytest.mark.parametrize("sizes", RAGGED.values(), ids=RAGGED)
def test_results_are_those_of_single_launches(pair, sizes, device, one_tile):
    one_tile(gemm_each.TILES[-1])
    assert_as_one_by_one(problems_of(sizes, pair, device))


@pytest.mark.parametrize("tile", gemm_each.TILES, ids=lambda tile: f"{tile.rows}x{tile.columns}")
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)], ids=str)
def test_output_dtypes_with_biases(tile, dtypes, device, one_tile):
    one_tile(tile)
    sizes = [(20, 48, 64), (70, 130, 17), (1, 16, 32)]
    biases = [torch.randn(n, device=device).to(dtypes[1]) for _, n, _ in sizes]
    assert_as_one_by_one(problems_of(sizes, (PerBlock(1, 32), PerBlock(1, 32)), device), biases, dtypes[0])


def test_more_tiles_than_programs_in_bands_of_rows(device, one_tile):
    """A program leaves a problem, and begins in the middle of another."""
    one_tile(gemm_each.TILES[-1])
    assert_as_one_by_one(problems_of([(64 * 10, 200, 32), (1, 1, 16), (64, 600, 32)], (PerRow(), PerRow()), device))


def test_codes_in_any_layout(device, one_tile):
    one_tile(gemm_each.TILES[0])
    a, b = problems_of([(48, 20, 130), (70, 20, 130), (16, 20, 130)], (PerTensor(), PerTensor()), device)
    transposed = [replace(q, data=q.data.view(torch.uint8).t().contiguous().t().view(q.data.dtype)) for q in a]
    wide = torch.zeros(70, 160, dtype=torch.uint8, device=device)
    wide[:, 5:135] = a[1].data.view(torch.uint8)
    shifted = replace(a[1], data=wide[:, 5:135].view(a[1].data.dtype))
    for left in (transposed, [a[0], shifted, a[2]], [transposed[0], shifted, a[2]]):
        assert_as_one_by_one((left, b))
        assert_as_one_by_one((b, left))


def sorted_rows(experts: int, device: torch.device) -> Problems:
    sizes = [(1 + number % 5, 48, 64) for number in range(experts)]
    return problems_of(sizes, (PerRow(), PerRow()), device)


@pytest.mark.parametrize("experts", [2, 16])
def test_launches_do_not_grow_with_the_number_of_problems(experts, device):
    with counted() as launches:
        multiply_each(sorted_rows(experts, device), None, torch.bfloat16)
    assert launches == {"scaled_gemm_each": 1}
    pair = (PerBlock(1, 32), PerBlock(1, 32))
    ragged = problems_of([(20, 30, 33 + number) for number in range(experts)], pair, device)
    with counted() as launches:
        multiply_each(ragged, None, torch.bfloat16)
    assert launches == {"scaled_gemm_each": 1, "copy_each_kernel": 3}, "codes of both, and scales of b"


def layer_step(recipe: str, split: list[int], device: torch.device, *, stored_transposed: bool = False) -> list[Tensor]:
    x, weight, bias, grad = (tensor.detach().to(device) for tensor in tensors(torch.bfloat16))
    if stored_transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
    y = fp8_grouped_linear(*leaves, torch.tensor(split, device=device), recipes.get(recipe))
    return results(y, grad, *leaves)


@pytest.mark.parametrize(
    ("split", "stored_transposed"),
    [
        (SPLITS[0], True),
        pytest.param(SPLITS[1], False, marks=pytest.mark.long),
        (SPLITS[3], False),
        (SPLITS[4], False),
    ],
    ids=str,
)
@each_recipe
def test_a_layers_results_are_those_of_its_experts_one_by_one(
    recipe, split, stored_transposed, device, one_tile, monkeypatch
):
    one_tile(gemm_each.TILES[-1])
    monkeypatch.setattr(each, "select_product", lambda *_, **__: ("triton", None))
    with counted() as launches:
        together = layer_step(recipe, split, device, stored_transposed=stored_transposed)
    monkeypatch.setattr(each, "select_product", lambda *_, **__: ("none that takes several", None))
    monkeypatch.setattr(each, "scaled_mm", lambda a, b, *, out_dtype, bias, **_: gemm.product(a, b, bias, out_dtype))
    one_by_one = layer_step(recipe, split, device, stored_transposed=stored_transposed)
    for one, other in zip(together, one_by_one, strict=True):
        assert torch.equal(one, other)
    fp8 = {"bf16": 0, "rowwise_hp_grad_weight": 2}.get(recipe, 3)
    assert launches["scaled_gemm_each"] == (fp8 if any(split) else 0), "one for each of the three products"
    assert launches["scaled_gemm"] == 0


def test_what_does_not_belong_together_is_refused(device):
    a, b = sorted_rows(2, device)
    outs = [torch.empty(len(left.data), 48, device=device) for left in a]
    for wrong, words in (
        (lambda: gemm_each.product_each(a, b, [outs[0], outs[1].t()]), "contiguous"),
        (lambda: gemm_each.product_each(a, [b[0], operand(48, 80, PerRow(), device)], outs), "times"),
        (lambda: gemm_each.product_each(a, [b[0], operand(48, 64, PerTensor(), device)], outs), "granularity"),
        (lambda: gemm_each.product_each(a, b, [outs[0], outs[1].half()]), "dtype"),
    ):
        with pytest.raises(BackendError, match=words):
            wrong()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
def test_a_step_of_64_experts_on_a_gpu(recipe, device, monkeypatch):
    """Backward is another thread's, which finds memory for descriptors too; sums are those of single launches."""
    torch.manual_seed(0)
    manual = recipes.get(recipe).is_delayed
    layer = GroupedLinear(64, 512, 384, recipe=recipe, manual_scale_updates=manual).to(device, torch.bfloat16)
    offsets = torch.tensor([0, *torch.randint(0, 4000, (63,)).sort().values.tolist(), 4000], device=device)
    x, grad = torch.randn(4000, 512, device=device).bfloat16(), torch.randn(4000, 384, device=device).bfloat16()

    def step() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        return results(layer(leaf, offsets), grad, leaf, layer.weight)

    with counted() as launches:
        together = step()
    assert launches["scaled_gemm_each"] == (2 if recipe == "rowwise_hp_grad_weight" else 3)
    if recipe in {"tensorwise", "delayed"}:
        assert launches.total() < 20, "of 64 experts"
    monkeypatch.setattr(each, "backend_of_cast", lambda *_: "none that takes several")
    monkeypatch.setattr(each, "select_product", lambda *_, **__: ("none that takes several", None))
    monkeypatch.setattr(each, "scaled_mm", lambda a, b, *, out_dtype, bias, **_: gemm.product(a, b, bias, out_dtype))
    for one, other in zip(together, step(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_cuda_graph_has_a_launch_for_each(device):
    a, b = sorted_rows(4, device)
    outs = [torch.empty(len(left.data), 48, device=device) for left in a]
    each.scaled_mm_each(a, b, outs)
    wanted = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with counted() as launches, torch.cuda.graph(graph):
        each.scaled_mm_each(a, b, outs)
    assert launches["scaled_gemm_each"] == 0
    for out in outs:
        out.zero_()
    graph.replay()
    for out, expected in zip(outs, wanted, strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
