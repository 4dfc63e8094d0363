"""NVIDIA's Transformer Engine: the forward pass of its four FP8 recipes.

Scales are made by ``compute_scale_from_amax``; the Python reference that the package ships makes the same scales of
finite tensors; of others the kernels were read. Current and block scaling read the norm's output in BF16.
"""

from dataclasses import replace

from octavo.formats import E4M3, E8M0
from octavo.numerics import Accumulate, PerBlock, Scaling
from octavo.numerics.engine_cast import AmaxOf, Division, EngineCast, PowerOfTwo
from octavo.recipes.engines.profile import EngineProfile, Source, not_run

__all__ = ["TRANSFORMER_ENGINE"]

VERSION = "2.20.2"
TEST = "tests/oracle/engines/test_transformer_engine.py"
RECIPES = "transformer_engine/common/recipe/__init__.py"


def _read(file: str, version: str = VERSION) -> Source:
    return Source(project="TransformerEngine", version=version, file=file)


REFERENCE = Source(
    project="TransformerEngine",
    version=VERSION,
    file="transformer_engine/pytorch/custom_recipes/reference_current_scaling.py",
    test=TEST,
)
KERNEL = _read("transformer_engine/common/recipe/recipe_common.cuh", "main")
LAYERS = _read("transformer_engine/pytorch/module/linear.py")
COMMON = {
    "requantizes": LAYERS,
    "activations": LAYERS,
    "fused_cast": _read("transformer_engine/pytorch/module/layernorm_linear.py"),
    "products": LAYERS,
    "accumulate": _read(RECIPES),
    "output": LAYERS,
    "head": LAYERS,
    "kv_cache": _read("transformer_engine/pytorch/attention/inference.py"),
    "skipped": LAYERS,
}
CURRENT_CAST = EngineCast(
    division=Division.LIMIT_BY_AMAX, zero_scale=1.0, infinite_encode="tensor", nonfinite_scale=1.0
)
DELAYED_CAST = EngineCast(scaling=Scaling.DELAYED, division=Division.LIMIT_BY_AMAX, amax_of=AmaxOf.NUMBERS)
TILE = replace(CURRENT_CAST, granularity=PerBlock(1, 128), power_of_two=PowerOfTwo.ENCODE_DOWN)
GROUP = EngineCast(
    granularity=PerBlock(1, 32),
    amax_of=AmaxOf.NUMBERS,
    division=Division.AMAX_BY_RECIPROCAL,
    power_of_two=PowerOfTwo.SCALE_UP,
    scale_format=E8M0,
    zero_scale=E8M0.min_normal,
    zero_amax=E4M3.max * E8M0.min_normal,  # their byte is 0
    zero_encode=1.0,  # in place of 2^127
)
SCALED = {"weight": REFERENCE, "input": REFERENCE} | {
    f"{role}.{name}": KERNEL for role in ("weight", "input") for name in ("amax_of", "nonfinite_scale", "saturation")
}
BLOCKS = {
    name: _read(RECIPES) if "granularity" in name else source
    for role in ("weight", "input")
    for name, source in not_run(REFERENCE, role, "granularity", "division", "infinite_encode").items()
}

TRANSFORMER_ENGINE = (
    EngineProfile(
        name="te-current",
        engine="Transformer Engine, Float8CurrentScaling",
        weight=CURRENT_CAST,
        input=CURRENT_CAST,
        accumulate=Accumulate.HOPPER_FAST,
        sources=COMMON | SCALED,
    ),
    EngineProfile(
        name="te-delayed",
        engine="Transformer Engine, DelayedScaling",
        weight=DELAYED_CAST,
        input=DELAYED_CAST,
        fused_cast=True,
        accumulate=Accumulate.HOPPER_FAST,
        sources=COMMON
        | dict.fromkeys(("weight", "input"), _read("transformer_engine/common/recipe/delayed_scaling.cu", "main")),
    ),
    EngineProfile(
        name="te-block",
        engine="Transformer Engine, Float8BlockScaling",
        weight=replace(TILE, granularity=PerBlock(128, 128)),
        input=TILE,
        accumulate=Accumulate.HOPPER_SLOW,
        sources=COMMON | SCALED | BLOCKS,
    ),
    EngineProfile(
        name="te-mxfp8",
        engine="Transformer Engine, MXFP8BlockScaling",
        weight=GROUP,
        input=GROUP,
        sources=COMMON
        | dict.fromkeys(("weight", "input"), _read("transformer_engine/common/cast/mxfp8/quantize_mxfp8.cuh", "main")),
    ),
)
