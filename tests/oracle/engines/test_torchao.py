"""torchao's own casts against the profiles: codes and scales, bit for bit, of finite tensors and others."""

import pytest
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from octavo.engines import get, quantize_as
from tests.oracle.engines.adversarial import input_cast, same_codes, tensor
from tests.oracle.engines.compared import every_tensor

RECIPES = {"torchao-tensorwise": {}, "torchao-rowwise": {"scaling_granularity": ScalingGranularity.AXISWISE}}
RECIPES["torchao-rowwise"] |= {"axiswise_dim": -1, "round_scales_to_power_of_2": True}


@pytest.mark.parametrize("role", ["weight", "input"])
@every_tensor("torchao-rowwise", "input")
@pytest.mark.parametrize("engine", RECIPES)
def test_codes_and_scales(engine, name, dtype, role):
    x = tensor(name, dtype)
    theirs = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig(), **RECIPES[engine])
    ours = quantize_as(x, getattr(get(engine), role))
    assert same_codes(ours.data, theirs._data)
    encode_scale = theirs._scale.reshape(ours.scale.shape)
    assert torch.equal(ours.scale.nan_to_num(-1), encode_scale.reciprocal().nan_to_num(-1))


def test_scales_next_to_powers_of_two():
    """Every amax within 64 steps of a power of two that FP32 has between 2^-40 and 2^127."""
    powers = torch.exp2(torch.arange(-40, 127).float())
    near = (powers.view(torch.int32)[:, None] + torch.arange(-64, 65)).view(torch.float32)
    x = torch.stack([near.flatten(), torch.zeros(near.numel())], 1)
    theirs = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig(), **RECIPES["torchao-rowwise"])
    ours = quantize_as(x, input_cast("torchao-rowwise"))
    assert torch.equal(ours.scale, theirs._scale.reciprocal())
    assert same_codes(ours.data, theirs._data)
