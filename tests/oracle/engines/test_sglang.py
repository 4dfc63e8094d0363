"""SGLang's own Triton quantizers, from its package, under Triton's interpreter, against the profiles.

The interpreter's maximum lets NaN through, which a GPU's does not: tensors are finite here. Its cast to FP8 drops the
carry of a mantissa: the kernels store quotients in FP32, and ml_dtypes casts these. Its division and logarithm are
NumPy's; on NVIDIA's GPUs FP32 division and log2 may differ in the last bits.
"""

from functools import cache

import pytest
import torch

from octavo.engines import quantize_as
from tests.oracle.engines.adversarial import input_cast, same_codes, tensor
from tests.oracle.engines.compared import COMPARED, every_tensor
from tests.oracle.engines.interpreted import cast_by_peer, run_interpreted
from tests.oracle.engines.sources import load_engine_module

REQUIREMENT = "sglang==0.5.23"
SCRIPT = """
import types
same = lambda scale, **_: scale  # DeepGEMM only moves the scales
sys.modules["deep_gemm"] = types.SimpleNamespace(transform_sf_into_required_layout=same)
from tests.oracle.engines.test_sglang import group_quantizer
quantize = group_quantizer()
results = {}
for name, x in tensors.items():
    ue8m0, groups = name.startswith("ue8m0"), x.shape[1] // 128
    scale = torch.empty(groups, len(x)).t() if ue8m0 else torch.empty(len(x), groups)
    results[name] = quantize(x, 128, column_major_scales=ue8m0, scale_ue8m0=ue8m0, output_s=scale, output_q=x.float())
"""


@cache
def group_quantizer():
    module = load_engine_module(REQUIREMENT, "sglang.kernels.ops.quantization.fp8_kernel")
    return module._per_token_group_quant_8bit_raw


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return run_interpreted(SCRIPT, inputs(), tmp_path_factory.mktemp("sglang"))


def inputs():
    groups = COMPARED["sglang-block", "input"]
    return {
        f"{kind} {dtype} {name}": tensor(name, dtype)
        for kind in ("float", "ue8m0")
        for dtype in groups.dtypes
        for name in groups.names
    }


@pytest.mark.long
@every_tensor("sglang-block", "input")
@pytest.mark.parametrize(("kind", "engine"), [("float", "sglang-block"), ("ue8m0", "sglang-block-ue8m0")])
def test_inputs(theirs, kind, engine, name, dtype):
    quotients, scale = theirs[f"{kind} {dtype} {name}"]
    ours = quantize_as(tensor(name, dtype), input_cast(engine))
    assert torch.equal(ours.scale, scale)
    assert same_codes(ours.data, cast_by_peer(quotients))
