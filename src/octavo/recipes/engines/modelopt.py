"""NVIDIA's Model Optimizer, whose files TensorRT-LLM runs: static scales per tensor, and MXFP8."""

from octavo.formats import E4M3, E8M0
from octavo.numerics import PerBlock, Scaling
from octavo.numerics.engine_cast import Application, Division, EngineCast, PowerOfTwo
from octavo.recipes.engines.profile import EngineProfile, Source

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
WEIGHT = EngineCast(zero_scale=1.0, application=Application.DIVIDE, applied_in=None)
INPUT = EngineCast(
    scaling=Scaling.STATIC, division=Division.LIMIT_BY_RECIPROCAL, zero_amax=2.0**-24, zero_scale=1 / E4M3.max
)
GROUP = EngineCast(granularity=PerBlock(1, 32), power_of_two=PowerOfTwo.SCALE_UP_BY_LOG2, scale_format=E8M0)

MODELOPT = (
    EngineProfile(
        name="modelopt",
        engine="Model Optimizer for TensorRT-LLM, per tensor, static",
        weight=WEIGHT,
        input=INPUT,
        sources=COMMON | {"weight": _source("export/quant_utils.py"), "input": _source("quantization/tensor_quant.py")},
    ),
    EngineProfile(
        name="modelopt-mxfp8",
        engine="Model Optimizer, MXFP8",
        weight=GROUP,
        input=GROUP,
        sources=COMMON
        | {
            "weight": _source("quantization/qtensor/mxfp8_tensor.py"),
            "input": _source("quantization/qtensor/mxfp8_tensor.py"),
        },
    ),
)
