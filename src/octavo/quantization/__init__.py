"""From a trained model to one in FP8: text to measure it on, and training that knows of the rounding."""

from octavo.quantization.distillation import distillation_loss
from octavo.quantization.qat import convert_qat, freeze_scales, parameter_groups, prepare_qat
from octavo.quantization.qat_folder import load_qat, save_qat
from octavo.quantization.qat_run import QATResult, QATSettings, run_qat
from octavo.quantization.tuning import TuneSettings, tune
from octavo.quantization.windows import text_windows

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
    "text_windows",
    "tune",
]
