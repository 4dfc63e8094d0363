"""vLLM on NVIDIA's GPUs, and on AMD's MI300 with FNUZ codes.

``QuantFP8`` has a CUDA kernel, and PyTorch operations for compiled models; they differ in the last bit of a product.
Profiles that end in "-cuda" are those of the kernels.
"""

from dataclasses import replace

from octavo.formats import E4M3, E4M3_FNUZ
from octavo.numerics import Accumulate, PerBlock, PerRow, Scaling
from octavo.numerics.engine_cast import AmaxOf, Application, Division, EngineCast, PowerOfTwo, Saturation
from octavo.recipes.engines.profile import GIVEN_SCALE, EngineProfile, Source, interpreted, not_run

__all__ = ["VLLM"]

VERSION = "0.33.0"
TEST = "tests/oracle/engines/test_vllm.py"
QUANTIZATION = "vllm/model_executor/layers/quantization"
SMALLEST_SCALE = 512  # the scale's floor is 1 / (limit * 512)
FNUZ_LIMIT = 224.0  # in place of 240


def _source(file: str, test: str = "", version: str = VERSION) -> Source:
    return Source(project="vLLM", version=version, file=file, test=test)


def _kernel(file: str) -> Source:
    return _source(f"csrc/quantization/w8a8/fp8/{file}", version="main")


NATIVE = _source(f"{QUANTIZATION}/input_quant_fp8.py", TEST)
TRITON = _source(f"{QUANTIZATION}/utils/fp8_utils.py", TEST)
TRITON_GROUPS = (
    {"input": TRITON}
    | interpreted(TRITON, "input", "division", "application", "power_of_two")
    | not_run(TRITON, "input", "amax_of", "saturation", "nonfinite_scale")  # the interpreter's NaN is not a GPU's
)
DEEP_GEMM = _source("vllm/utils/deep_gemm.py", TEST)
BLOCKS = {"weight": DEEP_GEMM} | not_run(DEEP_GEMM, "weight", "scale_floor")
TOKENS = {"input": NATIVE} | not_run(NATIVE, "input", "amax_floor")
LAYER = _source(f"{QUANTIZATION}/fp8.py")
COMMON = dict.fromkeys(
    ("requantizes", "activations", "fused_cast", "products", "output", "head", "kv_cache", "skipped"), LAYER
) | {"accumulate": _source("vllm/model_executor/kernels/linear/scaled_mm/cutlass.py")}

STATIC = EngineCast(scaling=Scaling.STATIC)
TOKEN = EngineCast(granularity=PerRow(), scale_floor=1 / (E4M3.max * SMALLEST_SCALE))
CHANNEL = replace(TOKEN, scale_floor=0.0)
TOKEN_KERNEL = replace(
    TOKEN, amax_of=AmaxOf.NUMBERS, application=Application.DIVIDE, saturation=Saturation.NAN_TO_LIMIT
)
GROUP = EngineCast(
    granularity=PerBlock(1, 128),
    amax_of=AmaxOf.NUMBERS,
    amax_floor=1e-10,
    division=Division.AMAX_BY_RECIPROCAL,
    application=Application.DIVIDE,
)
BLOCK = EngineCast(granularity=PerBlock(128, 128), amax_floor=1e-4)
UP = PowerOfTwo.SCALE_UP_BY_LOG2
GROUP_KERNEL = replace(GROUP, division=Division.AMAX_BY_LIMIT, saturation=Saturation.NAN_TO_MINUS_LIMIT)
FNUZ_TOKEN = replace(TOKEN, format=E4M3_FNUZ, limit=FNUZ_LIMIT, scale_floor=1 / (FNUZ_LIMIT * SMALLEST_SCALE))

VLLM = (
    EngineProfile(
        name="vllm-tensor",
        engine="vLLM, per tensor, static",
        weight=replace(STATIC, scaling=Scaling.DYNAMIC),
        input=STATIC,
        accumulate=Accumulate.HOPPER_FAST,
        sources=COMMON | {"weight": _kernel("common.cu"), "input": NATIVE} | not_run(NATIVE, "input", *GIVEN_SCALE),
    ),
    EngineProfile(
        name="vllm-token",
        engine="vLLM, per token, compiled",
        weight=CHANNEL,
        input=TOKEN,
        accumulate=Accumulate.HOPPER_FAST,
        sources=COMMON | TOKENS | {"weight": _kernel("common.cu")},
    ),
    EngineProfile(
        name="vllm-token-cuda",
        engine="vLLM, per token, CUDA kernel",
        weight=CHANNEL,
        input=TOKEN_KERNEL,
        accumulate=Accumulate.HOPPER_FAST,
        sources=COMMON | {"weight": _kernel("common.cu"), "input": _kernel("common.cu")},
    ),
    EngineProfile(
        name="vllm-block",
        engine="vLLM, 128x128 blocks, Triton",
        weight=BLOCK,
        input=GROUP,
        accumulate=Accumulate.HOPPER_SLOW,
        sources=COMMON | TRITON_GROUPS | BLOCKS,
    ),
    EngineProfile(
        name="vllm-block-cuda",
        engine="vLLM, 128x128 blocks, CUDA kernel and CUTLASS",
        weight=BLOCK,
        input=GROUP_KERNEL,
        accumulate=Accumulate.HOPPER_SLOW,
        sources=COMMON | BLOCKS | {"input": _kernel("per_token_group_quant.cu")},
    ),
    EngineProfile(
        name="vllm-block-ue8m0",
        engine="vLLM, 128x128 blocks, DeepGEMM with UE8M0",
        weight=replace(BLOCK, power_of_two=UP),
        input=replace(GROUP, power_of_two=UP),
        requantizes=True,
        accumulate=Accumulate.HOPPER_SLOW,
        sources=COMMON | TRITON_GROUPS | BLOCKS | not_run(DEEP_GEMM, "weight", "divided_in") | {"requantizes": TRITON},
    ),
    EngineProfile(
        name="vllm-fnuz",
        engine="vLLM on MI300, per token, FNUZ codes",
        weight=replace(FNUZ_TOKEN, scale_floor=0.0),
        input=FNUZ_TOKEN,
        sources=COMMON | TOKENS | {"weight": _kernel("amd/quant_utils.cuh")},
    ),
)
