"""The answer of a service, by hand-made points whose times are known; and what it refuses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.planning import find_hardware, find_model, fitted_constants, hardware_names, model_names, read_rows
from octavo.planning.jobs import ServingJob
from octavo.planning.precision import BF16
from octavo.planning.serving_costs import kv_bytes, requests_in_flight, serving_parts
from octavo.planning.serving_plan import (
    FEWEST_MEASURED,
    ServingPoint,
    ServingRequest,
    serving_answer,
    serving_points,
)

CONSTANTS = fitted_constants()
ROWS = Path(__file__).parents[3] / "benchmarks" / "planner_rows.csv"
FP8_CACHE = "fp8, FP8 cache"


def point(precision: str, requests: int, token_ms: float, *, prompt: int = 512, gpus: int = 0) -> ServingPoint:
    """A point whose rate follows from its time, within a tenth less and a quarter more."""
    rate = 1e3 * requests / token_ms
    return ServingPoint(
        precision=precision,
        prompt=prompt,
        requests=requests,
        token_ms=token_ms,
        first_token_ms=1.0,
        tokens_per_s=rate,
        low=0.9 * rate,
        high=1.25 * rate,
        weights_gb=1.0,
        kv_gb=1.0,
        gpus_needed=gpus,
    )


def answer(**times: dict[int, float]) -> str:
    """Of milliseconds a token by precision and number of requests."""
    return " ".join(serving_answer([point(name, *each) for name, found in times.items() for each in found.items()]))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"bf16": {4: 30.0, 16: 60.0, 64: 99.0}, "fp8": {4: 31.0, 16: 40.0, 64: 200.0}}, "Serve in FP8: with 16"),
        ({"bf16": {16: 40.0}, "fp8": {16: 45.0}}, "Serve in BF16: with 16"),
        ({"bf16": {16: 40.0}, "fp8": {16: 35.0}, "int8": {16: 30.0}}, "Serve in INT8: with 16"),
        ({"bf16": {16: 40.0}, "int8": {16: 30.0}, "fp8": {16: 30.0}}, "Serve in FP8: with 16"),  # as fast, and measured
        ({"bf16": {16: 40.0}, "int8": {16: 29.98}, "fp8": {16: 30.0}}, "Serve in INT8: with 16"),
        ({"bf16": {1: 20.0, 4: 40.0}, "fp8": {1: 10.0, 4: 30.0, 16: 45.0}}, "Serve in FP8: with 4"),
        ({"bf16": {8: 1.0, 9: 60.0, 16: 1.0}, "fp8": {8: 2.0, 9: 30.0, 16: 2.0}}, "Serve in FP8: with 9"),
        ({"fp8": {16: 45.0}, "int8": {16: 50.0}}, "Serve in FP8: with 16"),
        ({"bf16": {16: 45.0}}, "Serve in BF16: with 16"),
        ({"bf16": {16: 45.0}, "fp8 weights": {16: 40.0}}, "Serve in 16 bits with FP8 weights: with 16"),
    ],
)
def test_the_answer_is_of_the_fewest_requests_above_eight(times, words):
    assert answer(**times).startswith(f"{words} requests a token takes ")
    assert ("BF16 does not fit." in answer(**times)) == ("bf16" not in times)


def test_every_format_has_its_time_with_the_ends_of_its_interval():
    """A rate from 0.9 to 1.25 times as high is a time from 0.8 to 1.11 times as long."""
    found = answer(bf16={16: 100.0}, int8={16: 60.0}, fp8={16: 50.0})
    for words in (
        "50.0 ms (40.0 to 55.6) in FP8",
        "60.0 ms (48.0 to 66.7) in INT8",
        "100.0 ms (80.0 to 111.1) in BF16",
    ):
        assert words in found
    assert "; 80 % intervals." in found


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"fp8": 30.0, "bf16": 31.0}, "BF16 does not differ reliably from FP8: intervals overlap."),
        ({"fp8": 50.0, "bf16": 69.4}, "BF16 does not differ reliably from FP8: intervals overlap."),
        ({"fp8": 50.0, "bf16": 69.5}, ""),
        (
            {"bf16": 30.0, "fp8": 31.0, "int8": 30.1},
            "FP8 and INT8 do not differ reliably from BF16: intervals overlap.",
        ),
        ({"fp8": 30.0, "int8": 30.0, "bf16": 60.0}, "INT8 does not differ reliably from FP8: intervals overlap."),
        ({"bf16": 30.0}, ""),
    ],
)
def test_formats_whose_intervals_overlap_do_not_differ_reliably(times, words):
    """From 0.8 to 1.11 times as long: 50 ms end at 55.56, where 69.44 begin."""
    found = answer(**{name: {16: token_ms} for name, token_ms in times.items()})
    assert ("reliably" in found) == bool(words)
    assert words in found


@pytest.mark.parametrize(
    ("bf16", "fp8", "words"),
    [
        (60.0, 50.0, "50 ms: none."),
        (60.0, 49.9, "50 ms: FP8."),
        (49.0, 51.0, "50 ms: BF16."),
        (40.0, 30.0, "50 ms: FP8, BF16."),
    ],
)
def test_formats_below_the_articles_latency_are_named(bf16, fp8, words):
    """Inference "latency less than 50ms at batch size greater than 8", says the article."""
    assert f"Less than the article's {words}" in answer(bf16={16: bf16}, fp8={16: fp8})


@pytest.mark.parametrize("requests", [9, 16, 31, 32, 64])
def test_fewer_requests_than_any_measurement_names_are_extrapolated(requests):
    found = answer(bf16={requests: 40.0}, fp8={requests: 30.0})
    number = "1 request" if requests == 1 else f"{requests} requests"
    assert (f"times of {number} are extrapolated" in found) == (requests < 32)


def test_no_row_names_fewer_requests():
    named = [row.cells["micro_batch"] for row in read_rows(ROWS) if row.kind == "infer"]
    assert min(int(each) for each in named if each) == FEWEST_MEASURED


def test_rates_and_gpus_are_of_the_prompt_that_was_asked_for():
    """The most requests of each format, and the fewest GPUs; the cache's format is no verdict of its own."""
    points = [
        point("bf16", 16, 100.0, gpus=20),
        point("bf16", 100, 200.0, gpus=7),
        point("bf16", 30, 1.0, prompt=2048, gpus=1),
        point("fp8", 16, 50.0, gpus=12),
        point("fp8", 200, 100.0, gpus=5),
        point("fp8", 60, 1.0, prompt=2048, gpus=1),
        point(FP8_CACHE, 16, 10.0, gpus=2),
        point(FP8_CACHE, 400, 160.0, gpus=1),
    ]
    found = serving_answer(points)
    assert found[0].startswith("Serve in FP8: with 16 requests a token takes 50.0 ms")
    assert found[-2] == (
        "As many requests as memory holds: 2,000 tokens/s (1,800 to 2,500, 200 requests) in FP8, "
        "500 tokens/s (450 to 625, 100 requests) in BF16, "
        "2,500 tokens/s (2,250 to 3,125, 400 requests) in FP8 with an FP8 cache."
    )
    assert found[-1] == (
        "GPUs for the load, below 50 ms a token where a format can be; requests of each replica: "
        "12 (16 requests at 50.0 ms) in FP8, 20 (16 requests at 100.0 ms) in BF16."
    )
    without_load = serving_answer([replace(each, gpus_needed=0) for each in points])
    assert without_load == found[:-1]


def test_gpus_of_a_load_keep_the_latency():
    """The fewest of those points whose tokens take less than 50 ms; more requests need fewer GPUs and take longer."""
    points = [
        *(point("fp8", requests, ms, gpus=gpus) for requests, ms, gpus in ((16, 30.0, 72), (64, 49.9, 36))),
        *(point("fp8", requests, ms, gpus=gpus) for requests, ms, gpus in ((256, 108.0, 18), (400, 160.0, 17))),
        *(point("bf16", requests, ms, gpus=gpus) for requests, ms, gpus in ((16, 51.0, 118), (256, 163.0, 26))),
    ]
    assert serving_answer(points)[-1].endswith(
        ": 36 (64 requests at 49.9 ms) in FP8, 118 (16 requests at 51.0 ms) in BF16."
    )


def test_slow_rates_have_digits():
    """A token in 20 s is 0.8 tokens/s of 16 requests, from 0.9 to 1.25 times that."""
    assert "0.8 tokens/s (0.72 to 1, 16 requests) in BF16" in answer(bf16={16: 20_000.0})


def test_gpus_of_a_load_are_of_a_time_that_the_table_has():
    points, _ = serving_points(request_of(load=20_000.0), CONSTANTS)
    of_prompt = [each for each in points if each.prompt == 512]
    for gpus, requests, ms in re.findall(r"([\d,]+) \((\d+) requests? at ([\d.]+) ms\)", serving_answer(points)[-1]):
        same = [each for each in of_prompt if each.gpus_needed == int(gpus) and each.requests == int(requests)]
        assert any(f"{each.token_ms:.1f}" == ms for each in same)
        assert float(ms) < 50


def request_of(**settings: Any) -> ServingRequest:
    given: dict[str, Any] = {"model": find_model("llama-3-8b"), "hardware": find_hardware("h100"), "gpus": 1}
    return ServingRequest(**(given | {"prompt": 512, "answer": 512} | settings))


@pytest.mark.parametrize("name", hardware_names())
def test_formats_are_tried_where_there_are_units_for_them(name):
    """FP8 of weights alone where there are none: half of BF16's bytes but for embeddings, the same products."""
    hardware = find_hardware(name)
    points, refused = serving_points(request_of(hardware=hardware), CONSTANTS)
    found = {each.precision: each for each in points if each.requests == 1}
    assert ("fp8" in found) == (FP8_CACHE in found) == hardware.has_fp8 == ("fp8 weights" not in found)
    assert ("int8" in found) == bool(hardware.int8)
    assert ("fp8" in refused) == (not hardware.has_fp8)
    if not hardware.has_fp8:
        model, embeddings = find_model("llama-3-8b"), 2 * 128256 * 4096
        assert found["fp8 weights"].weights_gb == pytest.approx((model.parameters + embeddings) / 1e9)
        assert found["fp8 weights"].first_token_ms == pytest.approx(found["bf16"].first_token_ms, rel=0.01)
        assert found["fp8 weights"].token_ms < found["bf16"].token_ms
        assert "in 16 bits with FP8 weights" in serving_answer(points)[0]


def test_a_cache_in_fp8_is_the_answer_where_nothing_else_fits():
    """600,000 tokens of llama-3-8b: 79 GB of keys and values in 16 bits and 39 in 8, beside 9 GB of weights in FP8."""
    points, refused = serving_points(request_of(prompt=600_000, answer=128), CONSTANTS)
    assert {each.precision for each in points} == {FP8_CACHE}
    assert set(refused) == {"bf16", "int8", "fp8"}
    only = points[0]
    low, high = (1e3 * only.requests / rate for rate in (only.high, only.low))
    found = serving_answer(points)
    assert found[0] == (
        f"Only FP8 with an FP8 cache fits: with 1 request a token takes {only.token_ms:.1f} ms ({low:.1f} to "
        f"{high:.1f}) in FP8 with an FP8 cache; 80 % intervals."
    )
    assert "Serve in" not in " ".join(found)
    assert found[-1].startswith("As many requests as memory holds: ")
    assert found[-1].endswith(", 1 request) in FP8 with an FP8 cache.")


def test_encoders_generate_nothing():
    encoders = [name for name in model_names() if not find_model(name).causal]
    assert encoders
    for name in encoders:
        with pytest.raises(ConfigError, match=f"{name} is an encoder and generates no tokens; plan inference of a dec"):
            request_of(model=find_model(name))


def test_a_request_of_a_hybrid_keeps_the_states_of_its_mixers():
    """Nemotron-H 8B: 24 Mamba-2 layers of 8,192 channels by 128 states in FP32, and three positions of a convolution.

    The convolution is of the channels, and of 8 groups' two inputs of 128 states. Four layers have keys and values.
    """
    service = service_of("nemotron-h-8b")
    states = 24 * (8192 * 128 * 4 + 3 * (8192 + 2 * 8 * 128) * 2)
    keys = 4 * 2 * 8 * 128
    assert kv_bytes(service, 1000) == states + 1000 * keys * 2
    assert kv_bytes(replace(service, precision=replace(BF16, kv_bytes=1)), 1000) == states + 1000 * keys
    assert kv_bytes(replace(service, gpus=2, tp=2), 1000) == states + 1000 * keys * 2, "ranks divide the channels"
    parts, requests = serving_parts(service), requests_in_flight(service)
    read = kv_bytes(service, service.prompt + service.answer / 2)
    assert parts["decode_keys"] == pytest.approx((read + states) / (3350 * 1e9)), "a step writes the states anew"
    assert 1 < requests < 1024


@pytest.mark.parametrize("name", ["nemotron-h-8b", "nemotron-nano-9b", "nemotron-3-nano", "llama-3-8b"])
def test_what_is_served_fits_into_the_memory_of_the_gpu(name):
    points, _ = serving_points(request_of(model=find_model(name), prompt=1024, answer=64), CONSTANTS)
    assert all(point.weights_gb + point.kv_gb + 1.5 <= 0.9 * 80 for point in points)


def test_a_model_that_keeps_nothing_of_a_request_is_refused():
    """Attention keeps keys and values, Mamba states; without either no number of requests follows."""
    states = replace(find_model("nemotron-h-8b"), name="mamba", attention_layers=0)
    points, _ = serving_points(request_of(model=states), CONSTANTS)
    assert all(point.kv_gb == pytest.approx(point.requests * 0.1021, rel=1e-3) for point in points)
    with pytest.raises(ConfigError, match="mlp has neither attention nor a mixer with states; plan inference of a mod"):
        serving_points(request_of(model=replace(states, name="mlp", mamba_layers=0)), CONSTANTS)


def service_of(name: str) -> ServingJob:
    return ServingJob(
        model=find_model(name),
        hardware=find_hardware("h100"),
        gpus=1,
        tp=1,
        prompt=1024,
        answer=64,
        precision=BF16,
    )


HUGE = 10**330


@pytest.mark.parametrize("field", ["gpus", "prompt", "answer"])
@pytest.mark.parametrize("number", [-1, 0, 10**9 + 1, HUGE])
def test_numbers_of_a_service_have_bounds(field, number):
    with pytest.raises(ConfigError, match="gpus, prompt and answer must be 1 to 1,000,000,000, and load between 0 an"):
        request_of(**{field: number})


def test_the_largest_service_is_answered_in_a_sentence():
    with pytest.raises(ConfigError, match="do not divide among 1000000000 GPUs; give a replica 32"):
        request_of(gpus=10**9)
    with pytest.raises(ConfigError, match="does not fit into 1 × 80 GB with a request of 2,000,000,000 tokens"):
        serving_points(request_of(prompt=10**9, answer=10**9), CONSTANTS)
