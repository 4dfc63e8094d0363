"""From a trained model to one in FP8: the text to measure it on, and the best mix of precisions."""

from octavo.quantization.sensitivity import Budget, Mix, Sensitivity, load_mix, measure_sensitivity, save_mix
from octavo.quantization.windows import text_windows

__all__ = [
    "Budget",
    "Mix",
    "Sensitivity",
    "load_mix",
    "measure_sensitivity",
    "save_mix",
    "text_windows",
]
