"""vLLM on NVIDIA's GPUs, and on AMD's MI300 with FNUZ codes.

``QuantFP8`` has a CUDA kernel, and PyTorch operations for compiled models; they differ in the last bit of a product.
Profiles that end in "-cuda" are those of the kernels.

Inductor compiles the operations, and the cast of weights in blocks, to Triton's kernels, whose division is approximate
unless its option ``division_rounding`` is set. Without ``emulate_precision_casts`` it may also drop a norm's rounding
before the cast that it is fused with: ``fused_cast`` is then what vLLM computes, and the profiles say that the rounding
stays, as in the operations themselves. No file that was read decides it.
"""

from dataclasses import replace

from octavo.formats import E4M3, E4M3_FNUZ
from octavo.numerics import Accumulate, PerBlock, PerRow, Scaling
from octavo.numerics.engine_cast import AmaxOf, Application, Division, EngineCast, PowerOfTwo, Saturation
from octavo.recipes.engines.profile import COMPILED, GIVEN_SCALE, INTERPRETED, EngineProfile, Source, limited, not_run

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
    | limited(TRITON, INTERPRETED, "input", "division", "application", "power_of_two")
    | not_run(TRITON, "input", "amax_of", "saturation", "nonfinite_scale")  # the interpreter's NaN is not a GPU's
)
DEEP_GEMM = _source("vllm/utils/deep_gemm.py", TEST)
BLOCKS = (
    {"weight": DEEP_GEMM}
    | limited(DEEP_GEMM, COMPILED, "weight", "division", "application", "power_of_two")
    | not_run(DEEP_GEMM, "weight", "scale_floor")
)
FUSED = {"fused_cast": Source(project="PyTorch", version="2.13.0", file="torch/_inductor/config.py")}
TOKENS = (
    {"input": NATIVE}
    | limited(NATIVE, COMPILED, "input", "division", "application")
    | not_run(NATIVE, "input", "amax_floor")
    | FUSED
)
STATIC_INPUTS = (
    {"input": NATIVE}
    | limited(NATIVE, COMPILED, "input", "application")
    | not_run(NATIVE, "input", *GIVEN_SCALE)
    | FUSED
)
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
        sources=COMMON | STATIC_INPUTS | {"weight": _kernel("common.cu")},
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
