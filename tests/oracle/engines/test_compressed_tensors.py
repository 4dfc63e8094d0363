"""compressed-tensors' own rounding of inputs and weights, from its package, against the profiles.

It makes no codes for an input but rounds it to E4M3 and back, in the input's dtype.
"""

from types import SimpleNamespace

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp

from octavo.engines import get, quantize_as
from tests.oracle.engines.adversarial import input_cast, tensor
from tests.oracle.engines.compared import every_tensor

E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN = QuantizationArgs(**E4M3, strategy="token", dynamic=True)
CHANNEL = QuantizationArgs(**E4M3, strategy="channel")
TENSOR = QuantizationArgs(**E4M3, strategy="tensor")


def equal(ours, theirs):
    """Equal numbers, -0 and 0 too: a zero point of 0 is added, which takes the sign of a zero away."""
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.nan_to_num(-7777), theirs.nan_to_num(-7777))


@every_tensor("compressed-tensors", "input")
def test_inputs(name, dtype):
    x = tensor(name, dtype)[None]  # [B, T, K]: of two dimensions all tokens would share a scale
    scale, zero_point = compute_dynamic_scales_and_zp(x, TOKEN, SimpleNamespace())
    theirs = fake_quantize(x, scale, zero_point, TOKEN)
    ours = quantize_as(x[0], input_cast("compressed-tensors"))
    equal(ours.scale.to(dtype), scale[0])
    equal(ours.dequantize(), theirs[0])


@every_tensor("compressed-tensors", "weight")
def test_weights(name, dtype):
    x = tensor(name, dtype)
    scale, zero_point = calculate_qparams(x.amin(1, keepdim=True), x.amax(1, keepdim=True), CHANNEL)
    theirs = quantize(x, scale, zero_point, CHANNEL, dtype=torch.float8_e4m3fn)
    ours = quantize_as(x, get("compressed-tensors").weight)
    equal(ours.scale.to(dtype), scale)
    equal(ours.data.float(), theirs.float())


@every_tensor("compressed-tensors-static", "input")
def test_static_inputs(value, name, dtype):
    x = tensor(name, dtype)
    scale = torch.tensor([value], dtype=dtype)
    theirs = fake_quantize(x, scale, None, TENSOR)
    ours = quantize_as(x, input_cast("compressed-tensors-static"), scale=scale.reshape(()))
    equal(ours.dequantize(), theirs)


def test_in_fp32_it_gives_octavos_codes_but_for_one_in_a_hundred_thousand():
    """Its scale is amax / 448 and octavo's 1 / (448 / amax): a last bit, which moves numbers next to a tie alone."""
    x = torch.randn(2048, 576, generator=torch.Generator().manual_seed(0))
    scale, zero_point = compute_dynamic_scales_and_zp(x[None], TOKEN, SimpleNamespace())
    theirs = quantize(x[None], scale, zero_point, TOKEN, dtype=torch.float8_e4m3fn)[0].float()
    ours = quantize_as(x, input_cast("octavo-token"))
    steps = (ours.scale.view(torch.int32) - scale[0].view(torch.int32)).abs()
    assert 0 < steps.float().mean() < 1
    assert steps.max() == 1
    assert (ours.data.float() != theirs).float().mean() < 1e-5
