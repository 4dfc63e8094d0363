"""Calibration: a timed linear layer is then predicted as it was timed."""

import json
import re

import pytest

from octavo.errors import DataError
from octavo.planning import find_hardware, fitted_constants
from octavo.planning.calibration import calibrated, read_calibration
from octavo.planning.constants import gemm_seconds
from octavo.planning.gemm_costs import gemm_parts
from octavo.planning.jobs import GemmJob
from octavo.planning.precision import precision_of_recipe

MEASURED = {"bf16": 0.036, "tensorwise": 0.0205, "rowwise": 0.0236}  # on an H100, forward and backward of 16384³


H100 = find_hardware("h100")
FACTS = {"device": "NVIDIA H100 80GB HBM3"}


def result(path, seconds, title="Linear, CUDA graph, forward and backward, 16384³", facts=FACTS):
    section = {"title": title, "raw": {"seconds": seconds}}
    path.write_text(json.dumps({"facts": facts, "parts": [{"sections": [section]}]}))
    return path


def test_the_timed_layer_is_predicted_as_it_was_timed(tmp_path):
    seconds = {f"{name}, CUDA graph": [value, 2 * value, value / 2] for name, value in MEASURED.items()}
    timings = read_calibration(result(tmp_path / "result.json", seconds), H100)
    assert {recipe: found for recipe, _, found in timings} == MEASURED
    constants = calibrated(fitted_constants(), timings, find_hardware("h100"))
    for recipe, value in MEASURED.items():
        job = GemmJob(shapes=((16384,) * 3,), hardware=find_hardware("h100"), precision=precision_of_recipe(recipe))
        assert gemm_seconds(gemm_parts(job), constants.values)["total"] == pytest.approx(value, rel=0.01)


def test_the_largest_layer_that_was_timed_counts(tmp_path):
    """Small layers are slower by launches, which the planner counts apart: 4096³ here by a tenth of a second."""
    sizes = {side: 3 * 2 * side**3 / 500e12 for side in (4096, 16384, 8192)}
    slow = {4096: 0.1, 16384: 0.0, 8192: 0.1}
    sections = [
        {
            "title": f"Linear, CUDA graph, forward and backward, {side}³",
            "raw": {"seconds": {"bf16, CUDA graph": [seconds + slow[side]]}},
        }
        for side, seconds in sizes.items()
    ]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"facts": FACTS, "parts": [{"sections": sections}]}))
    constants = calibrated(fitted_constants(), read_calibration(path, H100), H100)
    job = GemmJob(shapes=((16384,) * 3,), hardware=find_hardware("h100"), precision=precision_of_recipe("bf16"))
    assert gemm_seconds(gemm_parts(job), constants.values)["total"] == pytest.approx(sizes[16384], rel=0.01)


def test_a_timed_generation_is_no_longer_unmeasured(tmp_path):
    hardware = find_hardware("l40s")
    job = GemmJob(shapes=((8192,) * 3,), hardware=hardware, precision=precision_of_recipe("bf16"))
    written = result(tmp_path / "result.json", {"bf16, CUDA graph": [0.1]}, facts={"device": "NVIDIA L40S"})
    timings = read_calibration(written, hardware)
    constants = calibrated(fitted_constants(), timings, hardware)
    assert constants.width("gemm", job) == fitted_constants().intervals["gemm"]
    assert fitted_constants().width("gemm", job) > 1.5 * fitted_constants().intervals["gemm"]


def test_a_result_without_linear_layers_is_refused(tmp_path):
    path = result(tmp_path / "result.json", {}, title="quantize")
    with pytest.raises(DataError, match="--only linears"):
        read_calibration(path, H100)


@pytest.mark.parametrize(
    ("facts", "hardware", "says"),
    [
        (FACTS, "b200", "measured on 'NVIDIA H100 80GB HBM3', not on b200; give --hardware h100, or such a result"),
        (FACTS, "mi300x", "not on mi300x; give --hardware h100"),
        ({"device": "CPU, a rehearsal"}, "h100", "on 'CPU, a rehearsal', not on h100; give a result of that card"),
        ({}, "h100", "on a device that it does not name, not on h100"),
        ([], "h100", "on a device that it does not name"),
    ],
)
def test_a_result_of_another_card_is_refused(tmp_path, facts, hardware, says):
    path = result(tmp_path / "result.json", {"bf16, CUDA graph": [0.1]}, facts=facts)
    with pytest.raises(DataError, match=re.escape(says)):
        read_calibration(path, find_hardware(hardware))
