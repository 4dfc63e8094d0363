"""vLLM's own quantizers, from its package, against the profiles: PyTorch operations, and Triton under its interpreter.

The interpreter's maximum lets NaN through, which a GPU's does not: tensors of Triton's kernels are finite here. Its
cast to FP8 drops the carry of a mantissa: the kernels store quotients in FP32, and ml_dtypes casts these. Its division
and logarithm are NumPy's; on NVIDIA's GPUs FP32 division and log2 may differ in the last bits.

vLLM compiles the PyTorch operations. Most tests run them as they are; the last ones show that Inductor's code for a CPU
gives the same bits. Its code for a GPU divides approximately.
"""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from octavo.engines import get, quantize_as, weight_as
from octavo.numerics import PerBlock, QuantizedTensor
from octavo.numerics.fnuz import to_fnuz
from tests.oracle.engines.adversarial import finite_tensors, input_cast, same_codes, tensor
from tests.oracle.engines.compared import COMPARED, every_tensor
from tests.oracle.engines.interpreted import cast_by_peer, run_interpreted
from tests.oracle.engines.sources import importable, load_engine_module

REQUIREMENT = "vllm==0.33.0"
PACKAGE = "vllm.model_executor.layers.quantization"
UTILS = f"{PACKAGE}.utils.quant_utils"
GROUPS = COMPARED["vllm-block", "input"]
SCRIPT = """
from tests.oracle.engines.test_vllm import fp8_utils
quantize = fp8_utils().per_token_group_quant_fp8
results = {
    name: quantize(x, 128, use_ue8m0=name.startswith("ue8m0"), out_q=x.float()) for name, x in tensors.items()
}
"""


class Platform:
    """What the code asks about a GPU."""

    def __init__(self, dtype):
        self._dtype = dtype

    def fp8_dtype(self):
        return self._dtype

    def is_fp8_fnuz(self):
        return self._dtype is torch.float8_e4m3fnuz

    def is_cuda_alike(self):
        return False

    is_xpu = is_cuda = is_rocm = is_cuda_alike

    def __getattr__(self, name):
        return lambda *_, **__: False

    simple_compile_backend = "inductor"


class CustomOp(nn.Module):
    """Base class of vLLM's operations."""

    register = staticmethod(lambda name: lambda cls: cls)

    def __init__(self, **_):
        super().__init__()


def given(dtype=torch.float8_e4m3fn):
    import triton
    import triton.language as tl

    false = staticmethod(lambda *_, **__: False)
    return {
        "vllm.platforms": {"current_platform": Platform(dtype)},
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
        "vllm._aiter_ops": {"rocm_aiter_ops": SimpleNamespace(is_linear_fp8_enabled=false.__func__)},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b)},
    }


@cache
def input_quantizer(dtype=torch.float8_e4m3fn):
    return load_engine_module(REQUIREMENT, f"{PACKAGE}.input_quant_fp8", real=(UTILS,), given=given(dtype))


@cache
def fp8_utils():
    return load_engine_module(
        REQUIREMENT, f"{PACKAGE}.utils.fp8_utils", real=(UTILS, "vllm.utils.deep_gemm"), given=given()
    )


@cache
def deep_gemm():
    return load_engine_module(REQUIREMENT, "vllm.utils.deep_gemm", real=(UTILS,), given=given())


def quant_fp8(shape, *, static=False, dtype=torch.float8_e4m3fn):
    """``QuantFP8.forward_native``: what a compiled model compiles."""
    module = input_quantizer(dtype)
    return module.QuantFP8(
        static=static, group_shape=getattr(module.GroupShape, shape), use_ue8m0=False
    ).forward_native  # fmt: skip


def by_quant_fp8(x, scale=None, *, shape, dtype=torch.float8_e4m3fn):
    return quant_fp8(shape, static=scale is not None, dtype=dtype)(x, scale)


def compare(ours, codes, scale):
    assert torch.equal(ours.scale.nan_to_num(-1), scale.reshape(ours.scale.shape).nan_to_num(-1))
    assert same_codes(ours.data, codes)


@every_tensor("vllm-token", "input")
def test_inputs_per_token(name, dtype):
    x = tensor(name, dtype)
    compare(quantize_as(x, input_cast("vllm-token")), *by_quant_fp8(x, shape="PER_TOKEN"))


@every_tensor("vllm-tensor", "input")
def test_static_inputs(value, name, dtype):
    x = tensor(name, dtype)
    scale = torch.tensor([value], dtype=dtype).float()
    codes, kept = by_quant_fp8(x, scale, shape="PER_TENSOR")
    compare(quantize_as(x, input_cast("vllm-tensor"), scale=scale.reshape(())), codes, kept)


@every_tensor("vllm-fnuz", "input")
def test_inputs_in_fnuz(name, dtype):
    x = tensor(name, dtype)
    compare(quantize_as(x, input_cast("vllm-fnuz")), *by_quant_fp8(x, shape="PER_TOKEN", dtype=torch.float8_e4m3fnuz))


def test_weights_in_fnuz():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()][None]
    utils = load_engine_module(REQUIREMENT, f"{PACKAGE}.utils.w8a8_utils", given=given())
    theirs, scale, _ = utils.normalize_e4m3fn_to_e4m3fnuz(codes.clone(), torch.tensor(0.3))
    ours = to_fnuz(QuantizedTensor(codes, torch.tensor(0.3), get("vllm-tensor").weight.granularity, torch.float32))
    assert same_codes(ours.tensor.data, theirs)
    assert torch.equal(ours.tensor.scale, scale)


@every_tensor("vllm-block", "weight")
@pytest.mark.parametrize(
    ("engine", "ue8m0"), [("vllm-block", False), ("vllm-block-cuda", False), ("vllm-block-ue8m0", True)]
)
def test_weights_in_blocks(engine, ue8m0, name, dtype):
    x = tensor(name, dtype).repeat(20, 1)  # a ragged block
    with torch.compiler.set_stance("force_eager"):
        theirs = deep_gemm().per_block_cast_to_fp8(x, use_ue8m0=ue8m0)
    compare(quantize_as(x, get(engine).weight), *theirs)


def test_weights_of_a_file_are_quantized_again():
    q = quantize_as(finite_tensors(torch.bfloat16)["mixed rows"].repeat(20, 1), get("vllm-block").weight)
    codes, scale = q.data.clone(), q.scale.clone()
    with torch.compiler.set_stance("force_eager"), importable(fp8_utils()):
        fp8_utils().requant_weight_ue8m0_inplace(codes, scale)
    compare(weight_as(q, get("vllm-block-ue8m0")), codes, scale)
    assert q.granularity == PerBlock(128, 128)


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    tensors = {
        f"{kind} {dtype} {name}": tensor(name, dtype)
        for kind in ("float", "ue8m0")
        for dtype in GROUPS.dtypes
        for name in GROUPS.names
    }
    return run_interpreted(SCRIPT, tensors, tmp_path_factory.mktemp("vllm"))


@pytest.mark.long
@every_tensor("vllm-block", "input")
@pytest.mark.parametrize(("kind", "engine"), [("float", "vllm-block"), ("ue8m0", "vllm-block-ue8m0")])
def test_inputs_in_groups(groups, kind, engine, name, dtype):
    quotients, scale = groups[f"{kind} {dtype} {name}"]
    compare(quantize_as(tensor(name, dtype), input_cast(engine)), cast_by_peer(quotients), scale)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    [
        ("PER_TOKEN", torch.float8_e4m3fn, None),
        ("PER_TENSOR", torch.float8_e4m3fn, torch.tensor([0.37])),
        ("PER_TOKEN", torch.float8_e4m3fnuz, None),
    ],
    ids=["vllm-token", "vllm-tensor", "vllm-fnuz"],
)
def test_compiled_for_a_cpu_casts_of_inputs_are_the_same(shape, dtype, scale):
    eager = quant_fp8(shape, static=scale is not None, dtype=dtype)
    compiled = torch.compile(eager, dynamic=True, fullgraph=True)
    with importable(input_quantizer(dtype)):
        for name in COMPARED["vllm-token", "input"].names:
            x = tensor(name, torch.bfloat16)
            codes, scales = compiled(x, scale)
            expected, expected_scales = eager(x, scale)
            assert same_codes(codes, expected), name
            assert torch.equal(scales.nan_to_num(-1), expected_scales.nan_to_num(-1)), name


@pytest.mark.long
@pytest.mark.parametrize("ue8m0", [False, True])
def test_compiled_for_a_cpu_the_cast_of_weights_is_the_same(ue8m0):
    cast = deep_gemm().per_block_cast_to_fp8
    with importable(deep_gemm()):
        for name in COMPARED["vllm-block", "weight"].names:
            x = tensor(name, torch.bfloat16).repeat(20, 1)
            codes, scales = cast(x, use_ue8m0=ue8m0)
            with torch.compiler.set_stance("force_eager"):
                expected, expected_scales = cast(x, use_ue8m0=ue8m0)
            assert same_codes(codes, expected), name
            assert torch.equal(scales.nan_to_num(-1), expected_scales.nan_to_num(-1)), name
