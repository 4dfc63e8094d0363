"""NVIDIA's Model Optimizer, whose files TensorRT-LLM runs: static scales per tensor, and MXFP8."""

from octavo.formats import E4M3, E8M0, FP32
from octavo.numerics import PerBlock, Scaling
from octavo.numerics.engine_cast import Application, Division, EngineCast, PowerOfTwo
from octavo.recipes.engines.profile import EngineProfile, Source, not_run

__all__ = ["MODELOPT"]

VERSION = "0.47.0"
TEST = "tests/oracle/engines/test_modelopt.py"


def _source(file: str, test: str = TEST) -> Source:
    return Source(project="nvidia-modelopt", version=VERSION, file=f"modelopt/torch/{file}", test=test)


REST = _source("quantization/config.py", "")
COMMON = dict.fromkeys(
    ("requantizes", "activations", "fused_cast", "products", "accumulate", "output", "head", "kv_cache", "skipped"),
    REST,
)
WEIGHT = EngineCast(amax_floor=FP32.min_normal, zero_scale=1.0, application=Application.DIVIDE)
INPUT = EngineCast(
    scaling=Scaling.STATIC, division=Division.LIMIT_BY_RECIPROCAL, zero_amax=2.0**-24, zero_scale=1 / E4M3.max
)
GROUP = EngineCast(
    granularity=PerBlock(1, 32),
    power_of_two=PowerOfTwo.SCALE_UP_BY_LOG2,
    scale_format=E8M0,
    zero_scale=E8M0.min_normal,  # of a block with NaN too
)
EXPORT, EAGER = _source("export/quant_utils.py"), _source("quantization/tensor_quant.py")
BLOCKS = _source("quantization/qtensor/mxfp8_tensor.py")

MODELOPT = (
    EngineProfile(
        name="modelopt",
        engine="Model Optimizer for TensorRT-LLM, per tensor, static",
        weight=WEIGHT,
        input=INPUT,
        sources=COMMON
        | {"weight": EXPORT, "input": EAGER}
        | not_run(EXPORT, "weight", "nonfinite_scale")
        | not_run(EAGER, "input", "amax_of", "amax_floor", "scale_floor", "infinite_encode", "nonfinite_scale"),
    ),
    EngineProfile(
        name="modelopt-mxfp8",
        engine="Model Optimizer, MXFP8",
        weight=GROUP,
        input=GROUP,
        sources=COMMON
        | {"weight": BLOCKS, "input": BLOCKS}
        | not_run(BLOCKS, "weight", "divided_in")
        | not_run(BLOCKS, "input", "divided_in"),
    ),
)
