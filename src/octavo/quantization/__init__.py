"""From a trained model to one in FP8: calibration, training that knows of the rounding, the best mix; text for all."""

from octavo.quantization.calibration import (
    Calibration,
    LayerCoverage,
    LayerHealth,
    SeenData,
    calibrate,
    calibration_from_run,
    coverage,
    load_calibration,
)
from octavo.quantization.qat import (
    QATResult,
    QATSettings,
    TuneSettings,
    convert_qat,
    distillation_loss,
    freeze_scales,
    load_qat,
    parameter_groups,
    prepare_qat,
    run_qat,
    save_qat,
    tune,
)
from octavo.quantization.sensitivity import Budget, Mix, Sensitivity, load_mix, measure_sensitivity, save_mix
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
