"""Calibration: a timed linear layer is then predicted as it was timed."""

import json

import pytest

from octavo.errors import DataError
from octavo.planning import find_hardware, fitted_constants
from octavo.planning.calibration import calibrated, read_calibration
from octavo.planning.constants import gemm_seconds
from octavo.planning.gemm_costs import gemm_parts
from octavo.planning.jobs import GemmJob
from octavo.planning.precision import precision_of_recipe

MEASURED = {"bf16": 0.036, "tensorwise": 0.0205, "rowwise": 0.0236}  # on an H100, forward and backward of 16384³


def result(path, seconds, title="Linear, CUDA graph, forward and backward, 16384³"):
    section = {"title": title, "raw": {"seconds": seconds}}
    path.write_text(json.dumps({"parts": [{"sections": [section]}]}))
    return path


def test_the_timed_layer_is_predicted_as_it_was_timed(tmp_path):
    seconds = {f"{name}, CUDA graph": [value, 2 * value, value / 2] for name, value in MEASURED.items()}
    timings = read_calibration(result(tmp_path / "result.json", seconds))
    assert {recipe: found for recipe, _, found in timings} == MEASURED
    constants = calibrated(fitted_constants(), timings, find_hardware("h100"))
    for recipe, value in MEASURED.items():
        job = GemmJob(shapes=((16384,) * 3,), hardware=find_hardware("h100"), precision=precision_of_recipe(recipe))
        assert gemm_seconds(gemm_parts(job), constants.values)["total"] == pytest.approx(value, rel=0.01)


def test_a_result_without_linear_layers_is_refused(tmp_path):
    path = result(tmp_path / "result.json", {}, title="quantize")
    with pytest.raises(DataError, match="--only linears"):
        read_calibration(path)
