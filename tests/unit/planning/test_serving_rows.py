"""Rows of inference: replicas, latent attention, time to the first token; and cells that hold numbers."""

from typing import Any

import pytest

from octavo.planning import find_hardware, find_model, fitted_constants, predict_row
from octavo.planning.rows import Row, serving_job
from octavo.planning.serving_costs import kv_bytes, serving_parts
from octavo.planning.serving_plan import ServingRequest, serving_points

CONSTANTS = fitted_constants()
METRIC = "output_tokens_per_s"


def row(**cells):
    base = {"id": "row", "kind": "infer", "model": "Llama-3.1-8B", "hardware": "H100", "precision": "fp8"}
    return Row({name: str(value) for name, value in (base | {"seq": "1024/1024", "metric": METRIC} | cells).items()})


def predicted(**cells) -> Any:
    return predict_row(row(**cells), CONSTANTS)


def test_replicas_serve_side_by_side():
    one, eight = (predicted(gpus=gpus, tp=1) for gpus in (1, 8))
    assert eight.value == pytest.approx(8 * one.value)
    assert eight.bf16_value == pytest.approx(8 * one.bf16_value)
    of_gpu = predicted(gpus=8, tp=1, metric="output_tokens_per_s_per_gpu")
    assert of_gpu.value == pytest.approx(one.value)
    times = [predicted(gpus=gpus, tp=1, micro_batch=8, metric="tpot_ms").value for gpus in (1, 8)]
    assert times[0] == times[1]
    shared = [predicted(gpus=8, tp=1, global_batch=64), predicted(gpus=1, tp=1, global_batch=8)]
    assert shared[0].value == pytest.approx(8 * shared[1].value)


def test_a_service_on_unstated_gpus_is_one_replica():
    assert predicted(gpus="", tp=8) == predicted(gpus=8, tp=8)
    assert predicted(gpus="", tp="") == predicted(gpus=1, tp=1)


@pytest.mark.parametrize(
    ("cells", "words"),
    [({"gpus": 8, "tp": 3}, "not a multiple of the 3"), ({"gpus": 8, "tp": 4, "pp": 2}, "pipelines")],
)
def test_layouts_that_are_not_modelled_are_refused(cells, words):
    assert words in predicted(**cells).reason


def test_a_service_without_tokens_is_refused():
    """A prompt's own time does not depend on its answer, which may be none."""
    assert "'0/128' has a prompt of no tokens" in predicted(seq="0/128").reason
    assert "'128/0' has an answer of no tokens" in predicted(seq="128/0").reason
    assert predicted(seq="128/0", metric="ttft_ms").reason is None


def test_ranks_of_latent_attention_have_requests_of_their_own():
    cells = {"model": "DeepSeek-R1", "hardware": "H200", "gpus": 8, "tp": 8}
    assert predicted(**cells).value == predicted(**cells, notes="DEP8").value
    assert predicted(**cells).value > 1.5 * predicted(**cells, notes="TP attention").value
    assert serving_job(row(model="Llama-3.1-70B", gpus=8, tp=8)).divides_experts is False


def test_the_first_token_takes_a_prompts_flops():
    """Of 8192 tokens, so that launches are small: above the time at the peak, and within 2.5 times of it."""
    hardware, model = find_hardware("h100"), find_model("llama-3-8b")
    request = ServingRequest(model=model, hardware=hardware, gpus=1, prompt=8192, answer=64)
    points, _ = serving_points(request, CONSTANTS)
    weights = model.active_parameters - model.vocab * model.hidden
    least = 8192 * (2 * weights + model.attention_flops(8192)) / hardware.peak(16)
    found = [point.first_token_ms / 1e3 for point in points if point.precision == "bf16" and point.prompt == 8192]
    assert all(least < each < 2.5 * least for each in found)


@pytest.mark.parametrize("metric", ["ttft_ms", "TTFT (ms)", "time_to_first_token_ms"])
def test_the_time_to_the_first_token_of_a_row_is_that_of_a_plan(metric):
    request = ServingRequest(
        model=find_model("llama-3-8b"), hardware=find_hardware("h100"), gpus=1, prompt=4096, answer=64
    )
    points, _ = serving_points(request, CONSTANTS)
    cells = {"seq": "4096/64", "precision": "fp8 tensorwise W8A8", "source_repo_or_doc": "vllm", "metric": metric}
    found = predicted(**cells)
    assert found.value == pytest.approx(next(each.first_token_ms for each in points if each.precision == "fp8"))
    assert found.bf16_value == pytest.approx(next(each.first_token_ms for each in points if each.precision == "bf16"))
    assert "how they arrive" in predicted(**cells, micro_batch=8).reason
    rate = predicted(**cells | {"metric": "prefill_tokens_per_s"})
    assert rate.value == pytest.approx(4096 / (found.value / 1e3))


@pytest.mark.parametrize("metric", ["tpot_ms", "tokens_per_s_per_user", "latency_s"])
def test_what_a_user_sees_needs_the_number_of_requests(metric):
    assert "number of requests" in predicted(metric=metric).reason
    assert predicted(metric=metric, micro_batch=4).reason is None


@pytest.mark.parametrize("cell", ["8,192", "8k", "8K", "8192 (packed)", "8192.0"])
def test_numbers_are_read_in_their_usual_spellings(cell):
    cells = {"kind": "train", "metric": "step_time_s", "gpus": 8, "global_batch": 64}
    assert predicted(seq=cell, **cells).value == predicted(seq="8192", **cells).value is not None


@pytest.mark.parametrize("cell", ["n/a", "not stated", ">1 (not stated)", ""])
def test_cells_that_say_nothing_are_left_out(cell):
    cells = {"kind": "train", "metric": "step_time_s", "gpus": 8, "seq": 8192, "global_batch": 64}
    assert predicted(cp=cell, **cells).value == predicted(**cells).value is not None


@pytest.mark.parametrize(
    ("column", "cell"),
    [("seq", "2^13"), ("gpus", "16x8"), ("gpus", "8 nodes"), ("global_batch", "1,02"), ("tp", "2-4")],
)
def test_cells_whose_number_cannot_be_told_are_refused(column, cell):
    cells = {"kind": "train", "metric": "step_time_s", "gpus": 8, "seq": 8192} | {column: cell}
    assert predicted(**cells).reason.startswith(f"{column} '{cell}' is not a number")


@pytest.mark.parametrize(
    "seq",
    [
        "1024 in / 8192 out",
        "ISL 1024, OSL 8192",
        "1024+8192",
        "1k/8k",
        "1,024/8,192",
        "in1024/out8192",
        "1024 / 8192",
        "in 1024 out 8192",
        "1024 in 8192 out",
        "ISL=1024 OSL=8192",
        "input 1024, output 8192",
        "OSL 8192, ISL 1024",
        "8192 out / 1024 in",
        "1024/8192 (fixed)",
    ],
)
def test_lengths_of_prompts_and_answers(seq):
    job = serving_job(row(seq=seq))
    assert (job.prompt, job.answer) == (1024, 8192)


@pytest.mark.parametrize("notes", ["attention DP off", "no attention DP", "TP attention"])
def test_attention_to_different_requests_can_be_denied(notes):
    cells = {"model": "DeepSeek-R1", "hardware": "H200", "gpus": 8, "tp": 8}
    assert serving_job(row(**cells, notes=notes)).divides_experts is False
    assert serving_job(row(**cells, notes="attention DP")).divides_experts is True


def test_one_request_reads_no_more_experts_than_it_meets():
    """Of 256 experts a token meets eight: on eight ranks a step reads about one each, not all 32 of a rank."""
    cells = {"model": "DeepSeek-R1", "hardware": "H200", "gpus": 8, "tp": 8, "metric": "tpot_ms", "micro_batch": 1}
    divided, together = (predicted(**cells, notes=notes).value for notes in ("DEP8", "TP attention"))
    assert divided < 2.5 * together
    many = predicted(**cells | {"micro_batch": 2048}, notes="DEP8").value
    assert many > 3 * divided


def test_windowed_layers_keep_their_window():
    """Gemma 3 27B: 52 of 62 layers see 1,024 positions; keys and values of 16 heads of 128 in BF16."""
    service = serving_job(row(model="gemma-3-27b", hardware="H200", precision="bf16"))
    of_layer = 2 * 16 * 128 * 2
    assert kv_bytes(service, 512) == 62 * of_layer * 512
    assert kv_bytes(service, 32768) == (10 * 32768 + 52 * 1024) * of_layer


def test_ranks_beyond_the_links_exchange_over_the_network():
    """Eight H100 are linked at 450 GB/s, sixteen at a network's 50: nine times as long for as many bytes."""
    parts = [
        serving_parts(serving_job(row(model="Llama-3.1-405B", gpus=gpus, tp=gpus, micro_batch=8))) for gpus in (8, 16)
    ]
    sent = [each["decode_exchange"] / share for each, share in zip(parts, (7 / 8, 15 / 16), strict=True)]
    assert sent[1] == pytest.approx(9 * sent[0])


def test_points_of_a_plan_add_up():
    """Tokens a second are requests over the time between tokens; keys and values are of the prompt and 0.6 answers.

    Where memory limits the requests, the weights, these and 1.5 GB fill nine tenths of 80 GB.
    """
    model = find_model("llama-3-8b")
    request = ServingRequest(model=model, hardware=find_hardware("h100"), gpus=1, prompt=512, answer=512)
    points, _ = serving_points(request, CONSTANTS)
    for point in points:
        assert point.tokens_per_s == pytest.approx(1e3 * point.requests / point.token_ms)
        element = 1 if "cache" in point.precision else 2
        kept = 2 * 32 * 8 * 128 * element * (point.prompt + 0.6 * 512) * point.requests
        assert point.kv_gb == pytest.approx(kept / 1e9)
        assert point.low < point.tokens_per_s < point.high
    assert {point.prompt for point in points} == {512, 2048, 8192}
    longest = [point for point in points if point.prompt == 8192]
    full = {each.precision: max(longest, key=lambda point: point.requests) for each in longest}
    assert full
    for point in full.values():
        assert 72 - point.kv_gb / point.requests < point.kv_gb + point.weights_gb + 1.5 <= 72


def test_a_guessed_model_has_a_wider_interval_in_a_plan():
    ratios = []
    for name in ("llama-3-8b", "unheard-8b"):
        request = ServingRequest(model=find_model(name), hardware=find_hardware("h100"), gpus=1, prompt=512, answer=512)
        point = serving_points(request, CONSTANTS)[0][0]
        ratios.append(point.high / point.tokens_per_s)
    assert ratios[1] > 1.5 * ratios[0]
