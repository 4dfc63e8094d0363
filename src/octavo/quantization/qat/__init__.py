"""Quantization-aware training: prepare and convert a model, fine-tune it, and compare it with baselines."""

from octavo.quantization.qat.distillation import distillation_loss
from octavo.quantization.qat.folder import load_qat, save_qat
from octavo.quantization.qat.prepare import convert_qat, freeze_scales, parameter_groups, prepare_qat
from octavo.quantization.qat.run import QATResult, QATSettings, run_qat
from octavo.quantization.qat.tuning import TuneSettings, tune

__all__ = [
    "QATResult",
    "QATSettings",
    "TuneSettings",
    "convert_qat",
    "distillation_loss",
    "freeze_scales",
    "load_qat",
    "parameter_groups",
    "prepare_qat",
    "run_qat",
    "save_qat",
    "tune",
]
