"""Calibration: a timed linear layer is then predicted as it was timed."""

import json
import re

import pytest

from octavo.errors import DataError
from octavo.planning import PlanRequest, find_hardware, find_model, fitted_constants, make_plan
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
    constants = calibrated(fitted_constants(), timings, H100, file="result.json")
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
    constants = calibrated(fitted_constants(), read_calibration(path, H100), H100, file=path.name)
    job = GemmJob(shapes=((16384,) * 3,), hardware=find_hardware("h100"), precision=precision_of_recipe("bf16"))
    assert gemm_seconds(gemm_parts(job), constants.values)["total"] == pytest.approx(sizes[16384], rel=0.01)


def test_a_timed_generation_is_no_longer_unmeasured(tmp_path):
    hardware = find_hardware("l40s")
    job = GemmJob(shapes=((8192,) * 3,), hardware=hardware, precision=precision_of_recipe("bf16"))
    written = result(tmp_path / "result.json", {"bf16, CUDA graph": [0.1]}, facts={"device": "NVIDIA L40S"})
    timings = read_calibration(written, hardware)
    constants = calibrated(fitted_constants(), timings, hardware, file="result.json")
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


IN_SECONDS = {"bf16": 0.036, "tensorwise": 0.0205}


def written(path, seconds):
    return result(path / "result.json", {f"{name}, CUDA graph": [value] for name, value in seconds.items()})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bf16": 4.6, "tensorwise": 3.0}, "has 4.6 s of bf16, forward and backward of 16384×16384×16384: at the vend"),
        ({"tensorwise": 3.0}, "has 3 s of tensorwise, forward"),
        ({"tensorwise": 0.0133}, "peak it is 0.0133 s; give times in seconds, up to 20 times that, of a large layer"),
        ({"bf16": 0.026}, "has 0.026 s of bf16"),
    ],
)
def test_a_time_that_no_gpu_takes_is_refused(tmp_path, changed, words):
    """6 · 16384³ FLOPs at 1,978.9 TFLOP/s are 13.33 ms in FP8, at 989.4 they are 26.67 ms in BF16."""
    timings = read_calibration(written(tmp_path, IN_SECONDS | changed), H100)
    with pytest.raises(DataError, match=re.escape(words)):
        calibrated(fitted_constants(), timings, H100, file="result.json")


def test_a_time_of_casts_and_launches_is_refused(tmp_path):
    """Of a layer so small that no speed of its GEMMs follows."""
    path = result(
        tmp_path / "a.json", {"rowwise, CUDA graph": [1e-6]}, "Linear, CUDA graph, forward and backward, 512³"
    )
    with pytest.raises(
        DataError, match=r"hardly more than its casts and launches are predicted to take, .* a larger la"
    ):
        calibrated(fitted_constants(), read_calibration(path, H100), H100, file="a.json")


def test_an_emulated_recipe_is_left_out(tmp_path):
    """An H100 took 239 ms, 18 times its peak of FP8, to emulate MX scales; its plans refuse the recipe."""
    timings = read_calibration(written(tmp_path, IN_SECONDS | {"mxfp8": 0.239}), H100)
    constants = calibrated(fitted_constants(), timings, H100, file="result.json")
    assert constants.calibration is not None
    assert constants.calibration.kernels == {"gemm_bf16_hopper", "gemm_tensor_hopper"}


@pytest.mark.parametrize("first", [True, False])
def test_a_recipe_with_a_gradient_in_high_precision_times_no_kernel(tmp_path, first):
    """One of its three GEMMs is in BF16, so that its time says nothing about the others."""
    times = {"rowwise": 0.0236, "rowwise_hp_grad_weight": 0.0275}
    names = list(times) if first else list(times)[::-1]
    timings = read_calibration(written(tmp_path, {name: times[name] for name in names}), H100)
    alone = read_calibration(written(tmp_path, {"rowwise": 0.0236}), H100)
    found, wanted = (calibrated(fitted_constants(), each, H100, file="result.json") for each in (timings, alone))
    assert found == wanted


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("bf16", "tensorwise"), "recipes bf16, tensorwise, delayed; the others are the fit's"),
        (("rowwise",), "recipes rowwise, rowwise_hp_grad_weight; the others are the fit's"),
        (("bf16", "tensorwise", "rowwise", "blockwise"), "recipes bf16, tensorwise, delayed, rowwise, rowwise_hp_grad"),
    ],
)
def test_a_plan_says_of_which_recipes_it_has_timings(tmp_path, names, words):
    """Recipes that one kernel multiplies are measured together."""
    times = IN_SECONDS | {"rowwise": 0.0236, "blockwise": 0.029}
    timings = read_calibration(written(tmp_path, {name: times[name] for name in names}), H100)
    constants = calibrated(fitted_constants(), timings, H100, file="result.json")
    request = PlanRequest(model=find_model("smollm2-135m"), hardware=H100, gpus=1, seq=512)
    plan = make_plan(request, constants)
    assert plan.calibrated_with.startswith(f"Calibrated with result.json: {words}")
    assert ("the fit's" in plan.calibrated_with) == (len(names) < 4)
    assert plan.record()["calibration"] == {"file": "result.json", "recipes": list(plan.calibrated)}
    plain = make_plan(request, fitted_constants())
    assert plain.calibrated_with == ""
    assert plain.record()["calibration"] is None
