"""Static scales from data: observed inputs, magnitude histograms, range selection and health checks."""

from octavo.quantization.calibration.calibrate import LayerCoverage, calibrate, coverage
from octavo.quantization.calibration.compensated_rounding import compensate_rounding
from octavo.quantization.calibration.health import LayerHealth
from octavo.quantization.calibration.result import Calibration, SeenData, load_calibration
from octavo.quantization.calibration.run_history import calibration_from_run

__all__ = [
    "Calibration",
    "LayerCoverage",
    "LayerHealth",
    "SeenData",
    "calibrate",
    "calibration_from_run",
    "compensate_rounding",
    "coverage",
    "load_calibration",
]
