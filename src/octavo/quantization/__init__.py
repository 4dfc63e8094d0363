"""From a trained model to one in FP8: calibration, training that knows of the rounding, the best mix; text for all."""

from octavo.quantization.calibrate import LayerCoverage, calibrate, coverage
from octavo.quantization.calibration import Calibration, SeenData, load_calibration
from octavo.quantization.distillation import distillation_loss
from octavo.quantization.health import LayerHealth
from octavo.quantization.qat import convert_qat, freeze_scales, parameter_groups, prepare_qat
from octavo.quantization.qat_folder import load_qat, save_qat
from octavo.quantization.qat_run import QATResult, QATSettings, run_qat
from octavo.quantization.run_history import calibration_from_run
from octavo.quantization.sensitivity import Budget, Mix, Sensitivity, load_mix, measure_sensitivity, save_mix
from octavo.quantization.tuning import TuneSettings, tune
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
