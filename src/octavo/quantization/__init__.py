"""From a trained model to one in FP8: scales by calibration, training that knows of the rounding, and text for both."""

from octavo.quantization.calibrate import LayerCoverage, calibrate, coverage
from octavo.quantization.calibration import Calibration, SeenData, load_calibration
from octavo.quantization.distillation import distillation_loss
from octavo.quantization.health import LayerHealth
from octavo.quantization.qat import convert_qat, freeze_scales, parameter_groups, prepare_qat
from octavo.quantization.qat_folder import load_qat, save_qat
from octavo.quantization.qat_run import QATResult, QATSettings, run_qat
from octavo.quantization.run_history import calibration_from_run
from octavo.quantization.tuning import TuneSettings, tune
from octavo.quantization.windows import text_windows

__all__ = [
    "Calibration",
    "LayerCoverage",
    "LayerHealth",
    "QATResult",
    "QATSettings",
    "SeenData",
    "TuneSettings",
    "calibrate",
    "calibration_from_run",
    "convert_qat",
    "coverage",
    "distillation_loss",
    "freeze_scales",
    "load_calibration",
    "load_qat",
    "parameter_groups",
    "prepare_qat",
    "run_qat",
    "save_qat",
    "text_windows",
    "tune",
]
