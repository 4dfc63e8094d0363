"""Scale shapes, group maxima and expansion against loops over the groups, ragged tails and empty tensors included."""

import itertools
import math

import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics import PerBlock, PerRow, PerTensor
from octavo.numerics.granularity import granularity_or_default

SHAPES = [(4, 6), (5, 7), (1, 9), (9, 1), (2, 3, 5), (2, 1, 4, 3)]
GRANULARITIES = [PerTensor(), PerRow(), PerBlock(1, 3), PerBlock(2, 2), PerBlock(4, 16), PerBlock(3, 1)]
GRANULARITIES += [PerBlock(2**40, 2), PerBlock(2**62, 2**63 - 1)]  # no memory is as large


def group_of(granularity, index):
    """Where in the scale the element at ``index`` finds its own: one plain sentence a granularity."""
    match granularity:
        case PerTensor():
            return ()
        case PerRow():
            return (*index[:-1], 0)
        case PerBlock(rows, columns):
            return (*index[:-2], index[-2] // rows, index[-1] // columns)


def indices(shape):
    return itertools.product(*map(range, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_reduce_max_equals_a_loop_over_elements(granularity, shape):
    magnitudes = torch.rand(shape)
    expected: dict[tuple[int, ...], float] = {}
    for index in indices(shape):
        group = group_of(granularity, index)
        expected[group] = max(expected.get(group, 0.0), magnitudes[index].item())
    reduced = granularity.reduce_max(magnitudes)
    assert reduced.shape == granularity.scale_shape(magnitudes.shape)
    assert {index: reduced[index].item() for index in indices(reduced.shape)} == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_expand_gives_every_element_its_group(granularity, shape):
    scale_shape = granularity.scale_shape(torch.Size(shape))
    scale = torch.arange(1.0, 1 + math.prod(scale_shape)).reshape(scale_shape)
    full = granularity.expand(scale, torch.Size(shape)).broadcast_to(shape)
    assert all(full[index] == scale[group_of(granularity, index)] for index in indices(shape))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_reduce_max_reads_strided_tensors(granularity):
    magnitudes = torch.rand(7, 10)
    for view in (magnitudes.t(), magnitudes[::2, 1::3], magnitudes[:, :1].expand(7, 4)):
        assert torch.equal(granularity.reduce_max(view), granularity.reduce_max(view.contiguous()))


@pytest.mark.parametrize(
    ("granularity", "shape", "scale_shape"),
    [
        (PerTensor(), (0,), ()),
        (PerTensor(), (3, 0), ()),
        (PerRow(), (3, 0), (3, 1)),
        (PerRow(), (0, 3), (0, 1)),
        (PerRow(), (7,), (1,)),
        (PerBlock(2, 2), (3, 0), (2, 0)),
        (PerBlock(2, 2), (0, 3), (0, 2)),
        (PerBlock(1, 128), (3, 300), (3, 3)),
        (PerBlock(128, 128), (256, 128), (2, 1)),
    ],
)
def test_scale_shapes_and_empty_tensors(granularity, shape, scale_shape):
    assert granularity.scale_shape(torch.Size(shape)) == scale_shape
    reduced = granularity.reduce_max(torch.zeros(shape))
    assert torch.equal(reduced, torch.zeros(scale_shape))


@pytest.mark.parametrize(
    ("granularity", "free"),
    [(PerTensor(), True), (PerRow(), False), (PerBlock(1, 128), False), (PerBlock(128, 128), True)],
)
def test_orientation_free_means_that_the_transpose_has_the_same_groups(granularity, free):
    assert granularity.orientation_free is free
    magnitudes = torch.rand(300, 200)
    reduced, transposed = granularity.reduce_max(magnitudes), granularity.reduce_max(magnitudes.t())
    same = transposed.shape == reduced.mT.shape and torch.equal(transposed, reduced.mT) if reduced.ndim else True
    assert same is free


def test_equal_parameters_are_equal_granularities():
    assert PerBlock(1, 128) == PerBlock(1, 128) != PerBlock(128, 1)
    assert len({PerTensor(), PerTensor(), PerRow(), PerRow()}) == 2


@pytest.mark.parametrize(("granularity", "shape"), [(PerRow(), ()), (PerBlock(2, 2), (4,)), (PerBlock(2, 2), ())])
def test_too_few_dimensions(granularity, shape):
    message = rf"{type(granularity).__name__} needs a tensor of at least \d dimension\(s\), not shape "
    with pytest.raises(ConfigError, match=message):
        granularity.scale_shape(torch.Size(shape))


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (4, 0), (-1, 128)])
def test_empty_blocks_are_refused(rows, columns):
    with pytest.raises(ConfigError, match=rf"at least 1 row and 1 column, not {rows}x{columns}"):
        PerBlock(rows, columns)


@pytest.mark.parametrize("given", ["rowwise", PerRow, 128])
def test_unknown_granularities_are_refused(given):
    with pytest.raises(ConfigError, match=r"granularity must be octavo\.PerTensor\(\), PerRow\(\) or PerBlock"):
        granularity_or_default(given)
