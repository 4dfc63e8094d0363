"""From a trained model to one in FP8: text to measure it on, and static scales from calibration."""

from octavo.quantization.calibrate import LayerCoverage, calibrate, coverage
from octavo.quantization.calibration import Calibration, SeenData, load_calibration
from octavo.quantization.health import LayerHealth
from octavo.quantization.run_history import calibration_from_run
from octavo.quantization.windows import text_windows

__all__ = [
    "Calibration",
    "LayerCoverage",
    "LayerHealth",
    "SeenData",
    "calibrate",
    "calibration_from_run",
    "coverage",
    "load_calibration",
    "text_windows",
]
