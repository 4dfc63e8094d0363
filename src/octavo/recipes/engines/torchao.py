"""torchao's float8 training: the tensorwise and rowwise recipes of ``convert_to_float8_training``."""

from dataclasses import replace

import torch

from octavo.numerics import Accumulate, PerRow
from octavo.numerics.engine_cast import Division, EngineCast, PowerOfTwo
from octavo.recipes.engines.profile import EngineProfile, Source, not_run

__all__ = ["TORCHAO"]

VERSION = "0.18.0"


def _source(file: str, test: str = "") -> Source:
    return Source(project="torchao", version=VERSION, file=f"torchao/float8/{file}", test=test)


CAST = _source("float8_utils.py", "tests/oracle/engines/test_torchao.py")
LAYER = _source("float8_linear.py")
TENSOR = EngineCast(division=Division.LIMIT_BY_RECIPROCAL, divided_in=torch.float64, amax_floor=1e-12)
ROW = replace(TENSOR, granularity=PerRow(), power_of_two=PowerOfTwo.ENCODE_DOWN_BY_LOG2)
SOURCES = (
    {"weight": CAST, "input": CAST}
    | not_run(CAST, "weight", "infinite_encode")
    | not_run(CAST, "input", "infinite_encode")
) | dict.fromkeys(
    ("requantizes", "activations", "fused_cast", "products", "output", "head", "kv_cache", "skipped"), LAYER
)

TORCHAO = (
    EngineProfile(
        name="torchao-tensorwise",
        engine="torchao, tensorwise",
        weight=TENSOR,
        input=TENSOR,
        accumulate=Accumulate.HOPPER_FAST,
        sources=SOURCES | {"accumulate": _source("config.py")},
    ),
    EngineProfile(
        name="torchao-rowwise",
        engine="torchao, rowwise",
        weight=ROW,
        input=ROW,
        accumulate=Accumulate.HOPPER_FAST,
        sources=SOURCES | {"accumulate": _source("config.py")},
    ),
)
