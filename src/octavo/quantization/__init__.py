"""Quantization of trained models: calibration, quantization-aware training, layer sensitivity and text windows."""

from octavo.quantization.calibration.calibrate import LayerCoverage, calibrate, coverage
from octavo.quantization.calibration.compensated_rounding import compensate_rounding
from octavo.quantization.calibration.health import LayerHealth
from octavo.quantization.calibration.result import Calibration, SeenData, load_calibration
from octavo.quantization.calibration.run_history import calibration_from_run
from octavo.quantization.qat.distillation import distillation_loss
from octavo.quantization.qat.folder import load_qat, save_qat
from octavo.quantization.qat.prepare import convert_qat, freeze_scales, parameter_groups, prepare_qat
from octavo.quantization.qat.run import QATResult, QATSettings, run_qat
from octavo.quantization.qat.tuning import TuneSettings, tune
from octavo.quantization.sensitivity.mix import Mix, load_mix, save_mix
from octavo.quantization.sensitivity.study import Budget, Sensitivity, measure_sensitivity
from octavo.quantization.windows import text_windows

__all__ = [
    "Budget",
    "Calibration",
    "LayerCoverage",
    "LayerHealth",
    "Mix",
    "QATResult",
    "QATSettings",
    "SeenData",
    "Sensitivity",
    "TuneSettings",
    "calibrate",
    "calibration_from_run",
    "compensate_rounding",
    "convert_qat",
    "coverage",
    "distillation_loss",
    "freeze_scales",
    "load_calibration",
    "load_mix",
    "load_qat",
    "measure_sensitivity",
    "parameter_groups",
    "prepare_qat",
    "run_qat",
    "save_mix",
    "save_qat",
    "text_windows",
    "tune",
]
