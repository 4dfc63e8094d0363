"""Predictions: signs that are known, orders that must hold, and rows that cannot be predicted."""

import csv
from dataclasses import replace
from typing import Any

import pytest

from octavo.errors import ConfigError, DataError
from octavo.planning import (
    PlanRequest,
    advise,
    find_hardware,
    find_model,
    fitted_constants,
    make_plan,
    predict_row,
    read_rows,
)
from octavo.planning.plan import TRIED
from octavo.planning.rows import Row, gemm_job, serving_job, training_job
from octavo.planning.serving_plan import ServingRequest, serving_points

CONSTANTS = fitted_constants()


def row(**cells):
    base = {"id": "row", "kind": "train", "hardware": "H100", "gpus": 8, "precision": "float8 tensorwise"}
    return Row({name: str(value) for name, value in (base | cells).items()})


def predicted(**cells) -> Any:
    return predict_row(row(**cells), CONSTANTS)


def speedup(**cells):
    found = predicted(metric="tokens_per_s", **cells)
    return found.value / found.bf16_value


def plan(name="llama-3-8b", hardware="h100", gpus=64, **settings) -> Any:
    return make_plan(
        PlanRequest(model=find_model(name), hardware=find_hardware(hardware), gpus=gpus, **settings), CONSTANTS
    )


def test_the_gain_of_mpt_1b_vanishes_as_its_context_grows():
    """Published by llm-foundry: 1.35 times BF16 at 512 tokens, 1.10 at 8,192, 1.05 at 32,768."""
    settings = {"model": "MPT-1b", "dp_or_fsdp": "fsdp8 (FULL_SHARD)", "precision": "fp8 (TE, Composer amp_fp8)"}
    settings |= {"source_repo_or_doc": "mosaicml/llm-foundry", "notes": "activation ckpt False"}
    gains = [
        speedup(seq=seq, micro_batch=micro, global_batch=32 * micro, **settings)
        for seq, micro in ((512, 56), (8192, 2), (32768, 1))
    ]
    assert gains[0] > 1.2
    assert gains[0] > gains[1] > gains[2]
    assert gains[2] < 1.08


def test_nanochat_d12_loses_and_d32_gains():
    assert speedup(model="nanochat d12", precision="float8 rowwise", micro_batch=32, seq=2048) < 1
    assert speedup(model="nanochat d32", micro_batch=32, seq=2048) > 1.15
    small = plan("nanochat d12", gpus=8, seq=2048)
    by_name = {option.name: option.speedup for option in small.options}
    assert by_name["tensorwise"][0] < 1
    assert advise(small, CONSTANTS).use_fp8 is False


def test_a_speedup_is_a_metric_too():
    cells = {"kind": "gemm", "gpus": 1, "model": "linear M=16384 N=16384 K=16384 fwd+bwd"}
    found, timed = predicted(metric="speedup", **cells), predicted(metric="time_us", **cells)
    assert found.value == pytest.approx(timed.bf16_value / timed.value)
    assert found.bf16_value == 1


def test_an_a100_is_refused():
    made = plan(hardware="a100")
    assert made.best_fp8 is None
    assert {option.name for option in made.options} == set(TRIED)
    advice = advise(made, CONSTANTS)
    assert advice.recipe == "bf16"
    assert "no FP8 units" in advice.sentence


def test_small_layers_lose():
    small, large = (
        predicted(kind="gemm", gpus=1, model=f"linear M={n} N={n} K={n} fwd+bwd", metric="time_us")
        for n in (1024, 16384)
    )
    assert small.value > small.bf16_value
    assert large.value < large.bf16_value / 1.4


def test_a_large_model_gains_and_the_interval_holds_the_value():
    made = plan("llama-3-70b", gpus=256)
    advice = advise(made, CONSTANTS)
    assert advice.use_fp8
    assert made.best_fp8.speedup[1] < made.best_fp8.speedup[0] < made.best_fp8.speedup[2]
    assert any("context" in change for change in advice.changes)
    assert advise(made, CONSTANTS, tolerance=0.1).use_fp8 is False


def test_more_gpus_are_never_slower_in_all():
    totals = [plan(gpus=gpus, global_batch=1024).bf16.tokens_per_s_per_gpu * gpus for gpus in (16, 64, 256, 1024)]
    assert totals == sorted(totals)


def test_faster_hardware_is_faster_and_longer_sequences_are_slower():
    rates = [plan(hardware=name).bf16.tokens_per_s_per_gpu for name in ("a100", "h100", "b200")]
    assert rates == sorted(rates)
    contexts = [
        plan(seq=seq, global_batch=1 << 22 >> seq.bit_length()).bf16.tokens_per_s_per_gpu for seq in (2048, 8192, 32768)
    ]
    assert contexts == sorted(contexts, reverse=True)


def test_a_model_that_does_not_fit_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="use more GPUs"):
        plan("llama-3-405b", gpus=8)


def test_a_plan_adds_up():
    made = plan(tokens=2e12, price=2.0)
    best = made.bf16
    days = 2e12 / (best.tokens_per_s_per_gpu * 64) / 86400
    assert made.days(best) == pytest.approx(days)
    assert made.cost(best) == pytest.approx(days * 24 * 64 * 2.0)
    assert made.megawatt_hours(best) == pytest.approx(days * 24 * 64 * 700 / 1e6)
    assert sum(value for name, value in best.seconds.items() if name != "total") == pytest.approx(best.seconds["total"])
    assert best.memory.total < 0.95 * 80e9


def test_decoding_is_faster_and_smaller_in_fp8():
    request = ServingRequest(
        model=find_model("llama-3-8b"), hardware=find_hardware("h100"), gpus=1, prompt=512, answer=512, load=1e5
    )
    points, refused = serving_points(request, CONSTANTS)
    by_size = {(point.precision, point.requests): point for point in points}
    assert by_size["fp8", 16].token_ms < by_size["bf16", 16].token_ms
    assert by_size["fp8", 16].weights_gb < 0.6 * by_size["bf16", 16].weights_gb
    assert all(point.gpus_needed * point.tokens_per_s >= 1e5 for point in points)
    assert not refused
    _, refused = serving_points(replace(request, hardware=find_hardware("a100")), CONSTANTS)
    assert "no FP8 units" in refused["fp8"]


def test_settings_are_read_from_a_row():
    job = training_job(
        row(
            model="LLAMA3-70B SFT",
            hardware="DGX H100",
            gpus=64,
            tp=4,
            pp=4,
            cp=2,
            seq=8192,
            global_batch=128,
            micro_batch=1,
            notes="VP 5; GA 64; full AC",
            source_path_or_url="llama3.1/README_70b.md@v24.11.1",
        )
    )
    assert (job.layout.dp, job.layout.vp, job.micro_batches) == (2, 5, 64)
    assert job.release == pytest.approx(2024 + 10 / 12)
    assert str(job.recompute) == "full"
    service = serving_job(row(kind="infer", model="Llama-3.1-8B", gpus=2, tp=2, seq="128/2048"))
    assert (service.prompt, service.answer, service.tp) == (128, 2048, 2)
    products = gemm_job(row(kind="gemm", model="4 linears of one layer h=4096 ffn=16384 M=15872 wgrad"))
    assert len(products.shapes) == 4
    assert str(products.passes) == "grad_weight"


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"model": "nothing known"}, "no shape is known"),
        ({"model": "Llama-3-8B", "hardware": "abacus"}, "no figures are known"),
        ({"model": "Llama-3-8B", "kind": "dream"}, "is not one of train"),
        ({"model": "Llama-3-8B", "metric": "hours_for_2500_iters"}, "global batch"),
        ({"model": "Llama-3-8B", "kind": "infer", "seq": "7"}, "lengths of prompts and answers"),
        ({"model": "Llama-3-405B", "kind": "infer", "gpus": 1, "seq": "128/128"}, "does not fit"),
        ({"model": "a product", "kind": "gemm"}, "are not known"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(cells, words):
    found = predicted(**cells)
    assert found.value is None
    assert words in found.reason


def test_absurd_sizes_are_refused_without_warnings():
    found = predicted(model="Llama-3-8B", seq="9" * 40, micro_batch=1, global_batch=8, metric="step_time_s")
    assert found.value is None or found.value > 1e9
    huge = predicted(model="Llama-3-8B", seq="9" * 200, micro_batch=1, global_batch=8, metric="step_time_s")
    assert huge.reason is not None


def test_a_file_without_columns_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("id,model\na,b\n")
    with pytest.raises(DataError, match="has no column 'kind'"):
        read_rows(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not CSV"):
        read_rows(path)


def test_columns_may_be_missing_and_empty(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("id", "kind", "model", "hardware"), ("a", "train", "Llama-3-8B", "H100")])
    found: Any = predict_row(read_rows(path)[0], CONSTANTS)
    assert found.low < found.value < found.high
