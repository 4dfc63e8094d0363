"""octavo: FP8 training for PyTorch, on any CPU and on Hopper GPUs."""

import typing as _typing

from octavo import nn, recipes
from octavo.autocast import autocast
from octavo.convert import convert, restore
from octavo.formats import E4M3, E5M2
from octavo.kernels import fake_quantize, quantize, scaled_mm
from octavo.nn.scaling_state import load_scaling_state, nonfinite_counts, scaling_state, update_scales
from octavo.numerics import PerBlock, PerRow, PerTensor, QuantizedTensor, dequantize

if _typing.TYPE_CHECKING:  # loaded on first use
    from octavo import plot, rl
    from octavo.engines import agree
    from octavo.export import load_quantized, save_quantized
    from octavo.quantization import calibrate, convert_qat, load_calibration, prepare_qat

    __version__: str
else:
    from octavo._lazy import __dir__ as __dir__
    from octavo._lazy import __getattr__ as __getattr__

__all__ = [
    "E4M3",
    "E5M2",
    "PerBlock",
    "PerRow",
    "PerTensor",
    "QuantizedTensor",
    "agree",
    "autocast",
    "calibrate",
    "convert",
    "convert_qat",
    "dequantize",
    "fake_quantize",
    "load_calibration",
    "load_quantized",
    "load_scaling_state",
    "nn",
    "nonfinite_counts",
    "plot",
    "prepare_qat",
    "quantize",
    "recipes",
    "restore",
    "rl",
    "save_quantized",
    "scaled_mm",
    "scaling_state",
    "update_scales",
]
