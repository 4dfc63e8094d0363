"""Model Optimizer's own casts, from its package, against the profiles."""

from functools import cache

import pytest
import torch

from octavo.engines import get, quantize_as
from tests.oracle.engines.adversarial import FINITE, finite_tensors, input_cast, nonfinite_tensors, same_codes
from tests.oracle.engines.sources import load_engine_module

REQUIREMENT = "nvidia-modelopt==0.47.0"
DTYPES = (torch.float32, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


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


class TensorQuantizer:
    """Calibrated quantizer of a weight, as the export reads it."""

    is_enabled, num_bits, maxbound = True, (4, 3), 448.0

    def __init__(self, amax):
        self.amax = amax

    def export_amax(self):
        return torch.where(self.amax == 0, self.maxbound, self.amax)


@every_dtype
@pytest.mark.parametrize("name", [name for name in FINITE if name not in ("tiny", "subnormal")])
def test_weights(name, dtype):
    """Not tensors whose scale is so small that the export refuses it or its quotient overflows."""
    x = finite_tensors(dtype)[name]
    scale = export().get_scaling_factor(TensorQuantizer(x.abs().amax()))
    theirs = export().to_quantized_weight(x, scale, "fp8")
    ours = quantize_as(x, get("modelopt").weight)
    assert same_codes(ours.data, theirs)
    assert ours.scale == scale


@every_dtype
@pytest.mark.parametrize("name", [*FINITE, "Inf", "NaN"])
@pytest.mark.parametrize("amax", [None, 1e-9, 3.0])
def test_inputs(amax, name, dtype):
    """A calibrated input, rounded to E4M3 and back as the library's own evaluation does."""
    x = (finite_tensors(dtype) | nonfinite_tensors(dtype))[name]
    value = finite_tensors(torch.float32)["normal"].abs().amax() if amax is None else torch.tensor(amax)
    theirs = eager()._fp8_eager(x, value)
    ours = quantize_as(x, input_cast("modelopt"), amax=value)
    assert torch.equal(ours.dequantize().nan_to_num(-1), theirs.nan_to_num(-1))


@every_dtype
@pytest.mark.parametrize("name", FINITE)
def test_mxfp8(name, dtype):
    x = finite_tensors(dtype)[name]
    theirs, scale = mxfp8().quantize(x)
    ours = quantize_as(x, input_cast("modelopt-mxfp8"))
    assert torch.equal(ours.scale, scale)
    assert same_codes(ours.data, theirs.data)
