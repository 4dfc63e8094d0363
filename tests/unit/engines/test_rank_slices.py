"""Ranks that share a linear layer: sums of the slices' own layers, and which scales are then others."""

from dataclasses import replace

import pytest
import torch

from octavo.engines import get, linear_as, weight_as
from octavo.engines.model import EngineLinear
from octavo.engines.rank_slices import INPUTS, OUTPUTS, SlicedLinear, divided_dimension
from octavo.errors import ConfigError
from octavo.kernels.row_by_row import RowByRow
from octavo.numerics import Accumulate, PerTensor, quantize_as
from tests.oracle.engines.adversarial import input_cast

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 5, 512, generator=GENERATOR).bfloat16()
WEIGHT = torch.randn(256, 512, generator=GENERATOR).bfloat16()
BIAS = torch.randn(256, generator=GENERATOR).bfloat16()
ROWS_AND_BLOCKS = ("vllm-token", "octavo-token", "vllm-block", "sglang-block-ue8m0", "compressed-tensors")


def whole(profile, bias=BIAS):
    return EngineLinear(weight_as(WEIGHT, profile), bias, profile)


def sliced(profile, dimension, ranks, *, weight=WEIGHT, bias=BIAS, **options):
    return SlicedLinear(whole(profile, bias), weight, dimension=dimension, ranks=ranks, **options)


def one_rank(profile):
    return sliced(profile, OUTPUTS, 1, own_scales=False)


@pytest.mark.parametrize("name", [*ROWS_AND_BLOCKS, "te-current", "vllm-fnuz", "te-mxfp8"])
def test_a_row_has_the_bits_that_it_has_alone(name):
    """Codes of the whole input, as one scale a tensor depends on all rows."""
    profile = get(name)
    layer, amax = one_rank(profile), X.abs().amax().float()
    with RowByRow():
        together = layer(X)
        if input_cast(name).granularity == PerTensor():
            layer.layer.input_amax = amax
        assert torch.equal(together, torch.stack([layer(text) for text in X]))
        assert torch.equal(together[:, 3], torch.cat([layer(row) for row in X[:, 3].split(1)]))
    torch.testing.assert_close(together, whole(profile)(X))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ROWS_AND_BLOCKS)
def test_outputs_divided_change_no_bit(name, ranks):
    profile = get(name)
    if ranks == 4 and "block" in name:
        profile = replace(profile, weight=get("vllm-token").weight)  # 64 outputs of a rank are half a block
    layer = sliced(profile, OUTPUTS, ranks)
    assert torch.equal(layer(X), one_rank(profile)(X))
    assert layer.weight_scales == 0
    torch.testing.assert_close(layer(X), whole(profile)(X))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["vllm-token", "vllm-block", "te-current", "torchao-rowwise"])
def test_inputs_divided_are_the_sum_of_the_slices_layers(name, ranks):
    profile = get(name)
    parts = zip(X.chunk(ranks, -1), WEIGHT.chunk(ranks, -1), strict=True)
    total, *others = (
        linear_as(x, weight, profile, bias=BIAS if rank == 0 else None) for rank, (x, weight) in enumerate(parts)
    )
    for other in others:
        total = total + other
    assert total.dtype is torch.bfloat16
    assert torch.equal(sliced(profile, INPUTS, ranks)(X), total)


def test_a_slices_scale_is_another_where_the_rows_largest_number_is_elsewhere():
    profile = get("vllm-token")
    for ranks in (2, 4):
        layer = sliced(profile, INPUTS, ranks)
        layer(X)
        own = X.flatten(0, 1).unflatten(-1, (ranks, -1))
        expected = (own.abs().amax(-1) != X.flatten(0, 1).abs().amax(-1, keepdim=True)).double().mean()
        assert layer.input_scales == [float(expected)]
        assert 0.4 < layer.input_scales[0] < 0.8
        assert 0.4 < layer.weight_scales < 0.8


@pytest.mark.parametrize("name", ["vllm-block", "sglang-block", "vllm-block-ue8m0"])
def test_blocks_that_end_with_a_slice_have_the_wholes_scales(name):
    profile = get(name)
    own, shared = (sliced(profile, INPUTS, 4, own_scales=each) for each in (True, False))
    assert torch.equal(own(X), shared(X))
    assert own.input_scales == shared.input_scales == [0.0]
    assert own.weight_scales == 0


def test_a_slices_own_scale_is_the_error_beside_sums():
    """Against FP64 of the undivided codes."""
    profile = replace(get("vllm-token"), accumulate=Accumulate.FP32, output=torch.float32, activations=torch.float32)
    a, b = quantize_as(X.float().flatten(0, 1), input_cast("vllm-token")), whole(profile).codes
    x, weight = (each.data.double() * each.scale.double() for each in (a, b))
    exact = (x @ weight.t() + BIAS.double()).view(3, 5, 256)
    errors = [
        float((sliced(profile, INPUTS, 2, own_scales=each)(X).double() - exact).norm() / exact.norm())
        for each in (False, True)
    ]
    assert errors[0] < 1e-6
    assert errors[1] > 1e-3


def test_scales_of_a_calibration_are_those_of_every_slice():
    profile = get("vllm-tensor")
    weight = weight_as(WEIGHT, profile)
    layer = EngineLinear(weight, None, profile, input_scale=torch.tensor(0.01))
    ranks = SlicedLinear(layer, weight, dimension=INPUTS, ranks=2, sums=torch.float32)
    shared = SlicedLinear(layer, weight, dimension=INPUTS, ranks=2, own_scales=False, sums=torch.float32)
    assert torch.equal(ranks(X), shared(X))
    assert (ranks.input_scales, ranks.weight_scales) == ([0.0], 0.0)


def test_weights_that_are_cast_again_are_cast_once():
    profile = get("vllm-block-ue8m0")
    stored = weight_as(WEIGHT, get("vllm-block"))
    layer = EngineLinear(weight_as(stored, profile), None, profile)
    for own_scales in (True, False):
        ranks = SlicedLinear(layer, stored, dimension=OUTPUTS, ranks=2, own_scales=own_scales)
        torch.testing.assert_close(ranks(X), layer(X))
        assert torch.equal(ranks(X), SlicedLinear(layer, stored, dimension=OUTPUTS, ranks=1, own_scales=False)(X))


def test_what_ranks_cannot_share_is_refused():
    profile = get("vllm-block")
    with pytest.raises(ConfigError, match="3 ranks cannot share 512 channels"):
        sliced(profile, INPUTS, 3)
    with pytest.raises(ConfigError, match="do not end with a block of 128"):
        sliced(profile, INPUTS, 8, own_scales=False)
    with pytest.raises(ConfigError, match="do not end with a block of 128"):
        sliced(profile, OUTPUTS, 4, weight=weight_as(WEIGHT, profile))
    with pytest.raises(ConfigError, match=r"not of transformer\.h\.0\.mlp\.c_proj"):
        divided_dimension("transformer.h.0.mlp.c_proj")
