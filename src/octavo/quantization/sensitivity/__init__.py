"""Cost of FP8 for each layer of a language model, and the best mix of precisions."""

from octavo.quantization.sensitivity.ablation import Increase
from octavo.quantization.sensitivity.mix import Mix, load_mix, save_mix
from octavo.quantization.sensitivity.study import Budget, Found, Sensitivity, measure_sensitivity
from octavo.quantization.sensitivity.units import CHOICES, Unit, units_of

__all__ = [
    "CHOICES",
    "Budget",
    "Found",
    "Increase",
    "Mix",
    "Sensitivity",
    "Unit",
    "load_mix",
    "measure_sensitivity",
    "save_mix",
    "units_of",
]
