"""Hugging Face transformers: its own fine-grained FP8, and folders of compressed-tensors.

compressed-tensors decodes weights and rounds inputs to E4M3 and back; all arithmetic, the scale's too, is in the dtype
of the activations. transformers multiplies fine-grained FP8 by a kernel for GPUs.
"""

from dataclasses import replace

from octavo.numerics import PerBlock, PerRow, Scaling
from octavo.numerics.engine_cast import AmaxOf, Application, Division, EngineCast
from octavo.recipes.engines.profile import GIVEN_SCALE, EngineProfile, Products, Source, not_run

__all__ = ["HUGGINGFACE"]


def _compressed(file: str, test: str = "tests/oracle/engines/test_compressed_tensors.py") -> Source:
    return Source(
        project="compressed-tensors", version="0.20.0", file=f"compressed_tensors/quantization/{file}", test=test
    )


def _transformers(file: str, test: str = "") -> Source:
    return Source(project="transformers", version="5.23.0", file=f"transformers/{file}", test=test)


QDQ = EngineCast(
    granularity=PerRow(),
    divided_in=None,
    zero_scale="epsilon",
    zero_amax=None,
    application=Application.DIVIDE,
    applied_in=None,
)
COMPRESSED_SOURCES = (
    dict.fromkeys(("weight", "input"), _compressed("utils/helpers.py"))
    | dict.fromkeys(
        ("activations", "fused_cast", "accumulate", "output", "requantizes"), _compressed("lifecycle/forward.py", "")
    )
    | {"products": _compressed("lifecycle/forward.py", "tests/oracle/engines/test_compressed_tensors_model.py")}
    | dict.fromkeys(("head", "skipped"), _compressed("quant_config.py", ""))
    | {"kv_cache": _compressed("quant_config.py", "")}
)
BLOCK = EngineCast(
    granularity=PerBlock(128, 128), division=Division.LIMIT_BY_RECIPROCAL, zero_scale=1.0, amax_of=AmaxOf.ALL
)
KERNEL_CAST = EngineCast(
    granularity=PerBlock(1, 128), amax_of=AmaxOf.NUMBERS, scale_floor=1e-12, application=Application.DIVIDE
)

HUGGINGFACE = (
    EngineProfile(
        name="compressed-tensors",
        engine="transformers with compressed-tensors, dynamic per token",
        weight=QDQ,
        input=QDQ,
        products=Products.DECODED,
        sources=COMPRESSED_SOURCES,
    ),
    EngineProfile(
        name="compressed-tensors-static",
        engine="transformers with compressed-tensors, static",
        weight=QDQ,
        input=replace(QDQ, granularity=EngineCast().granularity, scaling=Scaling.STATIC),
        products=Products.DECODED,
        sources=COMPRESSED_SOURCES | not_run(COMPRESSED_SOURCES["input"], "input", *GIVEN_SCALE),
    ),
    EngineProfile(
        name="transformers-fp8",
        engine="transformers, fine-grained FP8",
        weight=BLOCK,
        input=KERNEL_CAST,
        sources={
            "weight": _transformers("integrations/finegrained_fp8.py", "tests/oracle/engines/test_transformers_fp8.py"),
            "input": Source(project="kernels-community/finegrained-fp8", version="main", file="fp8_act_quant_inline"),
        }
        | dict.fromkeys(
            ("requantizes", "activations", "fused_cast", "products", "accumulate", "output"),
            _transformers("integrations/finegrained_fp8.py"),
        )
        | dict.fromkeys(("head", "skipped"), _transformers("quantizers/quantizer_finegrained_fp8.py"))
        | {"kv_cache": _transformers("cache_utils.py")},
    ),
)
