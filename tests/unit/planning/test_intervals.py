"""Intervals of what no measurement is of: kernels and generations, by what the measured ones differ."""

import math
from typing import Any

import numpy as np
import pytest

from octavo.planning import PlanRequest, find_hardware, find_model, fitted_constants, make_plan, predict_row
from octavo.planning.rows import Row
from octavo.planning.serving_plan import ServingRequest, serving_points

CONSTANTS = fitted_constants()
MEASURED = ("hopper", "blackwell", "cdna")


def width_of_a_fourth(three: list[float]) -> float:
    """Half of the 80 % prediction interval of a normal variable after three draws of it.

    Student's t with two degrees of freedom has the quantile (2p - 1)·√(2 / (4p(1 - p))), here of p = 0.9.
    """
    quantile = 0.8 * math.sqrt(2 / 0.36)
    return quantile * float(np.std(three, ddof=1)) * math.sqrt(1 + 1 / 3)


BF16 = [CONSTANTS.values[f"gemm_bf16_{each}"] for each in MEASURED]
TENSOR = [CONSTANTS.values[f"gemm_tensor_{each}"] for each in MEASURED]
OF_GENERATION = width_of_a_fourth(BF16)
OF_KERNEL = width_of_a_fourth(list(np.subtract(TENSOR, BF16)))


@pytest.mark.parametrize(
    ("hardware", "precision", "of_time", "of_speedup"),
    [
        ("H100", "bf16", 0, None),
        ("H100", "float8 rowwise", 0, 0),
        ("B200", "float8 tensorwise", 0, 0),
        ("B200", "float8 rowwise", OF_KERNEL, OF_KERNEL),
        ("MI300X", "float8 rowwise", OF_KERNEL, OF_KERNEL),
        ("MI355X", "mxfp8", OF_KERNEL, OF_KERNEL),
        ("L40S", "bf16", OF_GENERATION, None),
        ("L40S", "float8 tensorwise", OF_GENERATION, OF_KERNEL),
        ("A100", "bf16", OF_GENERATION, None),
        ("H100", "int8", OF_KERNEL, OF_KERNEL),
    ],
)
def test_a_kernel_without_a_measurement_has_a_wider_interval(hardware, precision, of_time, of_speedup):
    cells = {"id": "row", "kind": "gemm", "hardware": hardware, "precision": precision, "gpus": "1"}
    cells |= {"model": "M=8192 N=8192 K=8192"}
    found: Any = predict_row(Row(cells | {"metric": "time_us"}), CONSTANTS)
    assert math.log(found.high / found.value) == pytest.approx(
        math.hypot(CONSTANTS.intervals["gemm"], of_time), rel=1e-3
    )
    if of_speedup is not None:
        found = predict_row(Row(cells | {"metric": "speedup"}), CONSTANTS)
        width = math.hypot(CONSTANTS.intervals["speedup"], of_speedup)
        assert math.log(found.high / found.value) == pytest.approx(width, rel=1e-3)


def test_recipes_of_a_plan_have_intervals_of_their_own():
    request = PlanRequest(model=find_model("smollm2-135m"), hardware=find_hardware("b200"), gpus=8, seq=2048)
    options = {option["recipe"]: option for option in make_plan(request, CONSTANTS).record()["options"]}
    known, new = CONSTANTS.intervals["train"], math.hypot(CONSTANTS.intervals["train"], OF_KERNEL)
    for name, width in (("bf16", known), ("tensorwise", known), ("mxfp8", known), ("rowwise", new), ("blockwise", new)):
        step = options[name]
        assert math.log(step["step_time_high_s"] / step["step_time_s"]) == pytest.approx(width, rel=1e-3), name
    for name, more in (("tensorwise", 0.0), ("rowwise", OF_KERNEL)):
        gain, low, high = options[name]["speedup"]
        width = math.hypot(CONSTANTS.intervals["speedup"], more)
        assert [math.log(gain / low), math.log(high / gain)] == pytest.approx([width, width], rel=1e-3), name


def test_a_service_on_a_generation_without_measurements_has_a_wider_interval():
    widths = []
    for name in ("h100", "l40s"):
        hardware = find_hardware(name)
        request = ServingRequest(model=find_model("llama-3-8b"), hardware=hardware, gpus=1, prompt=512, answer=512)
        point = serving_points(request, CONSTANTS)[0][0]
        widths.append(math.log(point.high / point.tokens_per_s))
    known = CONSTANTS.intervals["infer"]
    assert widths == pytest.approx([known, math.hypot(known, OF_GENERATION)], rel=1e-3)
