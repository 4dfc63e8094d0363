"""Model Optimizer's own casts, from its package, against the profiles."""

from functools import cache

import pytest
import torch

from octavo.engines import get, quantize_as
from tests.oracle.engines.adversarial import input_cast, same_codes, tensor
from tests.oracle.engines.compared import every_tensor
from tests.oracle.engines.sources import load_engine_module

REQUIREMENT = "nvidia-modelopt==0.47.0"


@cache
def export():
    package = "modelopt.torch.export"
    return load_engine_module(REQUIREMENT, f"{package}.quant_utils", real=(f"{package}.model_config",))


@cache
def eager():
    return load_engine_module(REQUIREMENT, "modelopt.torch.quantization.tensor_quant")


@cache
def mxfp8():
    package = "modelopt.torch.quantization"
    core = load_engine_module(REQUIREMENT, f"{package}.utils.core_utils")
    given = {f"{package}.utils": {name: getattr(core, name) for name in ("reduce_block_amax", "reduce_block_padding")}}
    given[f"{package}.qtensor.base_qtensor"] = {"BaseQuantizedTensor": Stored}
    return load_engine_module(REQUIREMENT, f"{package}.qtensor.mxfp8_tensor", given=given).MXFP8QTensor


class Stored:
    """What the codes are put into."""

    def __init__(self, shape, dtype, data):
        self.data = data


@cache
def tensor_quantizer():
    package = "modelopt.torch.quantization"
    return load_engine_module(REQUIREMENT, f"{package}.nn.modules.tensor_quantizer").TensorQuantizer


class Calibrated:
    """Calibrated quantizer of a weight, as the export reads it."""

    is_enabled, num_bits, maxbound, block_sizes, axis, is_static_block_quant = True, (4, 3), 448.0, None, None, False

    def __init__(self, amax):
        self.amax = amax

    def validate_attr(self, **_):
        pass

    def export_amax(self):
        return tensor_quantizer().export_amax(self)

    def _sanitize_export_amax(self, amax):
        return tensor_quantizer()._sanitize_export_amax(self, amax)


@pytest.mark.filterwarnings("ignore:.*amax entries of this:UserWarning")
@every_tensor("modelopt", "weight")
def test_weights(name, dtype):
    """Its own sanitized amax: that of zeros and NaN is 448, and no smaller one than the smallest normal number."""
    x = tensor(name, dtype)
    scale = export().get_scaling_factor(Calibrated(x.abs().amax()))
    theirs = export().to_quantized_weight(x, scale, "fp8")
    ours = quantize_as(x, get("modelopt").weight)
    assert same_codes(ours.data, theirs)
    assert torch.equal(ours.scale, scale[0])


@every_tensor("modelopt", "input")
def test_inputs(value, name, dtype):
    """A calibrated input, rounded to E4M3 and back as the library's own evaluation does."""
    x, amax = tensor(name, dtype), torch.tensor(value, dtype=dtype).float()
    theirs = eager()._fp8_eager(x, amax)
    ours = quantize_as(x, input_cast("modelopt"), amax=amax)
    assert torch.equal(ours.dequantize().nan_to_num(-1), theirs.nan_to_num(-1))


@every_tensor("modelopt-mxfp8", "input")
def test_mxfp8(name, dtype):
    x = tensor(name, dtype)
    theirs, scale = mxfp8().quantize(x)
    ours = quantize_as(x, input_cast("modelopt-mxfp8"))
    assert torch.equal(ours.scale, scale)
    assert same_codes(ours.data, theirs.data)
