import math

import pytest
import torch

from octavo.checkpoints.names import NAMES, checked_scale
from octavo.errors import CheckpointError
from octavo.formats import E8M0
from octavo.numerics import PerBlock, PerRow, PerTensor

SHAPE = torch.Size([192, 576])


def test_shapes():
    assert checked_scale("a", torch.ones(1), PerTensor(), SHAPE).shape == ()
    assert checked_scale("a", torch.ones(()), PerTensor(), SHAPE).shape == ()
    assert checked_scale("a", torch.ones(192, 1), PerRow(), SHAPE).shape == (192, 1)
    assert checked_scale("a", torch.ones(2, 5), PerBlock(128, 128), SHAPE).shape == (2, 5)


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (PerTensor(), (1, 1)),
        (PerRow(), (192,)),
        (PerRow(), (1, 192)),
        (PerBlock(128, 128), (5, 2)),
        (PerTensor(), (2,)),
    ],
)
def test_other_shapes_are_refused(granularity, shape):
    with pytest.raises(CheckpointError, match=r"q\.weight_scale is \["):
        checked_scale("q.weight_scale", torch.ones(shape), granularity, SHAPE)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -1.0])
def test_numbers_that_no_scale_is(wrong):
    scale = torch.ones(192, 1)
    scale[7] = wrong
    with pytest.raises(CheckpointError, match="positive, finite"):
        checked_scale("q.weight_scale", scale, PerRow(), SHAPE)


def test_narrow_scales_are_widened_and_integers_refused():
    scale = torch.tensor([0.3], dtype=torch.bfloat16)
    assert checked_scale("a", scale, PerTensor(), SHAPE) == scale.float()
    with pytest.raises(CheckpointError, match="int64"):
        checked_scale("a", torch.ones((), dtype=torch.int64), PerTensor(), SHAPE)


def test_bytes_belong_to_e8m0_and_nothing_else_does():
    scale = torch.tensor([[126], [127]], dtype=torch.uint8)
    assert checked_scale("a", scale, PerRow(), torch.Size([2, 8]), E8M0) is scale
    with pytest.raises(CheckpointError, match=r"a is torch\.uint8; a scale is float32"):
        checked_scale("a", scale, PerRow(), torch.Size([2, 8]))
    with pytest.raises(CheckpointError, match=r"a is torch\.float32; a scale of its recipe is an E8M0 byte"):
        checked_scale("a", torch.ones(2, 1), PerRow(), torch.Size([2, 8]), E8M0)
    scale[1] = 255
    with pytest.raises(CheckpointError, match="holds 255"):
        checked_scale("a", scale, PerRow(), torch.Size([2, 8]), E8M0)


def test_one_scale_is_written_as_each_format_has_it():
    assert NAMES["compressed-tensors"].written(torch.ones(())).shape == (1,)
    assert NAMES["modelopt"].written(torch.ones(())).shape == ()
    assert NAMES["compressed-tensors"].written(torch.ones(4, 1)).shape == (4, 1)
