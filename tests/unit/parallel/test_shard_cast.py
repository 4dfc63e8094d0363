"""Casts of shards against the cast of the whole weight, all ranks in one process."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from octavo import recipes
from octavo.kernels import cast
from octavo.numerics import AmaxRecord, CastSpec
from octavo.parallel.shard_cast import ShardCast

RECIPES = ("tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8")
SIZES = ((1, 5), (2, 1), (31, 7), (33, 40), (64, 32), (129, 130), (300, 24))  # [N, K]
RANKS = (1, 2, 3, 4, 8)


def shards(spec: CastSpec, *, transposed: bool, shape: tuple[int, int], ranks: int) -> list[ShardCast]:
    return [ShardCast(spec=spec, transposed=transposed, shape=shape, ranks=ranks, rank=rank) for rank in range(ranks)]


def weight_of(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Rows of different magnitude, a row of zeros, an infinity."""
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    weight[shape[0] // 2] = 0
    weight[-1, -1] = torch.inf
    return weight.to(dtype)


def casts_of(recipe: str) -> Iterator[tuple[CastSpec, bool]]:
    found = recipes.get(recipe)
    for spec, transposed in ((found.output.b, False), (found.grad_input.b, True)):
        assert spec is not None
        yield spec, transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_of_all_ranks_are_those_of_the_whole_weight(recipe, shape, dtype):
    weight = weight_of(shape, dtype)
    for spec, transposed in casts_of(recipe):
        expected = cast(weight.t() if transposed else weight, spec, record=AmaxRecord()).output
        for ranks in RANKS:
            parts = shards(spec, transposed=transposed, shape=shape, ranks=ranks)
            rows = [weight[slice(*part.rows(rank))] for rank, part in enumerate(parts)]
            amaxes = torch.stack([part.measure(own) for part, own in zip(parts, rows, strict=True)]).amax(0)
            sent = [part.cast(own, amaxes) for part, own in zip(parts, rows, strict=True)]
            assert len({(codes.shape, scales.shape) for codes, scales in sent}) == 1  # an all-gather's
            codes, scales = (torch.cat(each) for each in zip(*sent, strict=True))
            whole = parts[0].whole(codes, scales, amaxes, dtype)
            assert torch.equal(whole.data.contiguous().view(torch.uint8), expected.data.contiguous().view(torch.uint8))
            assert torch.equal(whole.scale, expected.scale)
            assert (whole.granularity, whole.hp_dtype) == (expected.granularity, expected.hp_dtype)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", [(1, 6), (31, 8), (33, 40)])
def test_rows_whose_columns_other_ranks_have_are_scaled_by_the_whole_row(shape, ranks):
    weight, spec = weight_of(shape, torch.float32), next(casts_of("rowwise"))[0]
    expected = cast(weight, spec, record=AmaxRecord()).output
    slices, found = weight.chunk(2, dim=1), []
    parts = [
        replace(each, reduces_rows=True)
        for each in shards(spec, transposed=False, shape=(shape[0], shape[1] // 2), ranks=ranks)
    ]
    amaxes = [
        torch.stack([part.measure(own[slice(*part.rows(part.rank))]) for own in slices]).amax(0) for part in parts
    ]
    if shape[0] == 1:  # a single band, which the ranks of both reduce
        amaxes = [torch.stack(amaxes).amax(0)] * ranks
    for own in slices:
        sent = [part.cast(own[slice(*part.rows(part.rank))], amax) for part, amax in zip(parts, amaxes, strict=True)]
        codes, scales = (torch.cat(each) for each in zip(*sent, strict=True))
        found.append(parts[0].whole(codes, scales, amaxes[0], torch.float32))
        assert torch.equal(found[-1].scale, expected.scale)
    codes = torch.cat([each.data.view(torch.uint8) for each in found], dim=1)
    assert torch.equal(codes, expected.data.view(torch.uint8))


def test_only_groups_that_ranks_share_are_reduced():
    blockwise, mxfp8, rowwise = (next(casts_of(name))[0] for name in ("blockwise", "mxfp8", "rowwise"))
    (aligned, *_), (cut, *_) = (shards(blockwise, transposed=False, shape=(rows, 64), ranks=2) for rows in (512, 520))
    assert (aligned.reduced, cut.reduced) == ((), (2,))  # rows 256 to 383, of which the first rank has 256 to 259
    assert shards(mxfp8, transposed=False, shape=(33, 64), ranks=2)[0].reduced == ()
    assert shards(mxfp8, transposed=True, shape=(150, 64), ranks=2)[0].reduced == (2,)
    columns = shards(rowwise, transposed=True, shape=(150, 64), ranks=2)[0]
    assert (columns.reduced, columns.width, columns.gathers_scales) == ((0,), 64, False)


def test_a_whole_tensor_s_amax_is_used_as_it_is_given():
    (spec, _), *_ = casts_of("tensorwise")
    weight, ranks = torch.ones(4, 4), 2
    parts = shards(spec, transposed=False, shape=(4, 4), ranks=ranks)
    amaxes = torch.tensor([[2.0]])
    codes = torch.cat([part.cast(weight[slice(*part.rows(rank))], amaxes)[0] for rank, part in enumerate(parts)])
    whole = parts[0].whole(codes, codes.new_empty(0), amaxes, torch.float32)
    assert whole.scale == torch.tensor(448.0).div(2).reciprocal()
    assert torch.equal(whole.data.float(), torch.full((4, 4), 224.0))
