"""The planner: predictions of what FP8 gains, on hardware that is not there.

    names and files → shapes (model_*.py, hardware.py, precision.py) and jobs (jobs.py, rows.py)
    jobs → ideal seconds by kind (gemm_costs.py, training_costs.py, serving_costs.py) and bytes (training_memory.py)
    ideal seconds → seconds, with fitted constants (constants.py) → predictions, plans, advice

``benchmarks/planner_fit.py`` fits the constants on published measurements and judges them on models that it left out.
"""

from octavo.planning.advice import Advice, Check, advise
from octavo.planning.constants import Constants, fitted_constants
from octavo.planning.hardware import Hardware, find_hardware, hardware_names
from octavo.planning.model_config import load_shape
from octavo.planning.model_names import find_model, model_names
from octavo.planning.model_shapes import ModelShape
from octavo.planning.plan import Option, Plan, PlanRequest, make_plan
from octavo.planning.prediction import Prediction, predict_row
from octavo.planning.rows import Row, read_rows

__all__ = [
    "Advice",
    "Check",
    "Constants",
    "Hardware",
    "ModelShape",
    "Option",
    "Plan",
    "PlanRequest",
    "Prediction",
    "Row",
    "advise",
    "find_hardware",
    "find_model",
    "fitted_constants",
    "hardware_names",
    "load_shape",
    "make_plan",
    "model_names",
    "predict_row",
    "read_rows",
]
