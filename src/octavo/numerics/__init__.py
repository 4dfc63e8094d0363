"""Pure tensor maths: casts, scales, granularities, metrics. No modules, no state, no devices chosen."""

from octavo.numerics.accumulate import Accumulate, hopper_chains, hopper_sums
from octavo.numerics.cast import Nonfinite, Overflow, Rounding, cast_nearest, cast_stochastic
from octavo.numerics.cast_spec import CastSpec
from octavo.numerics.engine_cast import EngineCast
from octavo.numerics.engine_quantize import quantize_as
from octavo.numerics.granularity import Granularity, PerBlock, PerRow, PerTensor
from octavo.numerics.metrics import flushed_energy, nonfinite_count, saturation_fraction, sqnr_db, underflow_fraction
from octavo.numerics.quantized import QuantizedTensor, dequantize, quantize
from octavo.numerics.scaling import (
    AmaxRecord,
    Measurement,
    ScaleRounding,
    Scaling,
    amax,
    encode_scale_from_amax,
    measure,
    power_of_two_floor,
    scale_from_amax,
)

__all__ = [
    "Accumulate",
    "AmaxRecord",
    "CastSpec",
    "EngineCast",
    "Granularity",
    "Measurement",
    "Nonfinite",
    "Overflow",
    "PerBlock",
    "PerRow",
    "PerTensor",
    "QuantizedTensor",
    "Rounding",
    "ScaleRounding",
    "Scaling",
    "amax",
    "cast_nearest",
    "cast_stochastic",
    "dequantize",
    "encode_scale_from_amax",
    "flushed_energy",
    "hopper_chains",
    "hopper_sums",
    "measure",
    "nonfinite_count",
    "power_of_two_floor",
    "quantize",
    "quantize_as",
    "saturation_fraction",
    "scale_from_amax",
    "sqnr_db",
    "underflow_fraction",
]
