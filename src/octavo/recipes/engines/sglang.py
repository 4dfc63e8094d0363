"""SGLang's block-wise FP8: 1x128 groups of inputs, with scales as they are or, for DeepGEMM on Blackwell, UE8M0."""

from dataclasses import replace

from octavo.numerics import Accumulate, PerBlock
from octavo.numerics.engine_cast import AmaxOf, Application, EngineCast, PowerOfTwo
from octavo.recipes.engines.profile import INTERPRETED, EngineProfile, Source, limited, not_run

__all__ = ["SGLANG"]

VERSION = "0.5.23"
KERNELS = "sglang/kernels/ops/quantization/fp8_kernel.py"


def _source(file: str, test: str = "") -> Source:
    return Source(project="SGLang", version=VERSION, file=file, test=test)


TRITON = _source(KERNELS, "tests/oracle/engines/test_sglang.py")
LAYER = _source("sglang/srt/layers/quantization/fp8.py")
COMMON = (
    {"input": TRITON}
    | limited(TRITON, INTERPRETED, "input", "division", "application", "power_of_two")
    | not_run(TRITON, "input", "amax_of", "saturation", "nonfinite_scale")  # the interpreter's NaN is not a GPU's
    | {"weight": _source("sglang/srt/layers/quantization/fp8_utils.py")}
    | dict.fromkeys(
        ("requantizes", "activations", "fused_cast", "products", "accumulate", "output", "head", "kv_cache", "skipped"),
        LAYER,
    )
)
GROUP = EngineCast(granularity=PerBlock(1, 128), amax_of=AmaxOf.NUMBERS, amax_floor=1e-10)
BLOCK = EngineCast(granularity=PerBlock(128, 128), amax_floor=1e-4)
UP = PowerOfTwo.SCALE_UP_BY_LOG2

SGLANG = (
    EngineProfile(
        name="sglang-block",
        engine="SGLang, DeepGEMM with float scales",
        weight=BLOCK,
        input=GROUP,
        accumulate=Accumulate.HOPPER_SLOW,
        sources=COMMON,
    ),
    EngineProfile(
        name="sglang-block-ue8m0",
        engine="SGLang, DeepGEMM with UE8M0 scales",
        weight=replace(BLOCK, power_of_two=UP),
        input=replace(GROUP, power_of_two=UP, application=Application.DIVIDE),
        requantizes=True,
        accumulate=Accumulate.HOPPER_SLOW,
        sources=COMMON | not_run(TRITON, "input", "divided_in"),
    ),
)
