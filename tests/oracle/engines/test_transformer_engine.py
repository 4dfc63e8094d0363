"""Transformer Engine's Python reference of current scaling, from its package, against the profiles.

Block scaling makes the same scales for each tile, so that the reference is run on every tile alone. For amaxes that
are not finite the reference differs from TE's kernels, which the profile follows: they were read, not run.
"""

from functools import cache

import pytest
import torch

from octavo.engines import get, quantize_as
from tests.oracle.engines.adversarial import input_cast, same_codes, tensor
from tests.oracle.engines.compared import every_tensor
from tests.oracle.engines.sources import load_engine_module

PACKAGE = "transformer_engine.pytorch.custom_recipes"


class Quantizer:
    """What the reference needs of its base class."""

    def __init__(self, *, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


@cache
def reference():
    return load_engine_module(
        "transformer-engine==2.20.2",
        f"{PACKAGE}.reference_current_scaling",
        real=(f"{PACKAGE}.reference_utils",),
        given={
            "transformer_engine.pytorch.quantized_tensor": {"Quantizer": Quantizer, "QuantizedTensorStorage": object}
        },
    )


def theirs(x, *, power_of_two):
    """Codes and scale of a tensor as a whole."""
    quantizer = reference().CurrentScalingQuantizerRef(
        torch.float8_e4m3fn, rowwise=True, columnwise=False, pow_2_scales=power_of_two
    )
    result = quantizer.quantize(x)
    return result.data, result.scale


@every_tensor("te-current", "input")
def test_current_scaling(name, dtype):
    x = tensor(name, dtype)
    data, scale = theirs(x, power_of_two=False)
    ours = quantize_as(x, input_cast("te-current"))
    assert same_codes(ours.data, data)
    assert torch.equal(ours.scale, scale.reshape(()))
    assert get("te-current").weight == input_cast("te-current")


@pytest.mark.parametrize("role", ["weight", "input"])
@every_tensor("te-block", "input")
def test_block_scaling(name, dtype, role):
    x = tensor(name, dtype)
    cast = getattr(get("te-block"), role)
    ours = quantize_as(x, cast)
    rows = cast.granularity.rows
    for i, row in enumerate(x.split(rows)):
        for j, tile in enumerate(row.split(128, dim=1)):
            data, scale = theirs(tile.contiguous(), power_of_two=True)
            assert same_codes(ours.data[i * rows : (i + 1) * rows, 128 * j : 128 * (j + 1)], data)
            assert ours.scale[i, j] == scale
