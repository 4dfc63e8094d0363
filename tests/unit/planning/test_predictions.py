"""Predictions: signs that are known, orders that must hold, and rows that cannot be predicted."""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path
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
    model_names,
    predict_row,
    read_rows,
)
from octavo.planning.constants import GUESSED, kernel_constant
from octavo.planning.gemm_costs import kernel_part
from octavo.planning.gemm_rows import gemm_job
from octavo.planning.hardware import hardware_names
from octavo.planning.jobs import Layout, Recompute, Sharding
from octavo.planning.plan import TRIED
from octavo.planning.precision import Kernel
from octavo.planning.rows import Row, serving_job, training_job
from octavo.planning.serving_plan import ServingRequest, serving_points
from octavo.planning.training_memory import training_memory

CONSTANTS = fitted_constants()
PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "planner_rows.csv"


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


def test_nanochat_d12_loses_with_scales_per_row_and_d32_gains():
    assert speedup(model="nanochat d12", precision="float8 rowwise", micro_batch=32, seq=2048) < 1
    assert speedup(model="nanochat d32", micro_batch=32, seq=2048) > 1.15
    for batch in (8 * 244, 0):  # micro-batches of four sequences, and of 32 as nanochat's
        small = plan("nanochat d12", gpus=8, seq=2048, global_batch=batch)
        by_name = {option.name: option.speedup for option in small.options}
        assert by_name["rowwise"][0] < 1
        assert advise(small).use_fp8 is False
        if batch:
            assert by_name["tensorwise"][0] < 1


def test_a_speedup_is_a_metric_too():
    cells = {"kind": "gemm", "gpus": 1, "model": "linear M=16384 N=16384 K=16384 fwd+bwd"}
    found, timed = predicted(metric="speedup", **cells), predicted(metric="time_us", **cells)
    assert found.value == pytest.approx(timed.bf16_value / timed.value)
    assert found.bf16_value == 1


@pytest.mark.parametrize("name", ["llama-3-70b", "mixtral-8x7b", "deepseek-v3"])
def test_layers_take_together_what_the_step_says_of_all(name):
    made = plan(name, gpus=512)
    assert set(made.by_layer) == {"bf16", made.best_fp8.name}
    for option in made.options:
        for kind, layers in made.by_layer.get(option.name, {}).items():
            assert sum(layers.values()) == pytest.approx(option.candidate.seconds[kind], rel=1e-9), (option.name, kind)


def test_an_a100_is_refused():
    made = plan(hardware="a100")
    assert made.best_fp8 is None
    assert {option.name for option in made.options} == set(TRIED)
    advice = advise(made)
    assert advice.recipe == "bf16"
    assert "no FP8 units" in advice.sentence


def test_small_layers_lose():
    small, large = (
        predicted(kind="gemm", gpus=1, model=f"linear M={n} N={n} K={n} fwd+bwd", metric="time_us")
        for n in (1024, 16384)
    )
    assert small.value > small.bf16_value
    assert large.value < large.bf16_value / 1.4


@pytest.mark.long
def test_a_large_model_gains_and_the_interval_holds_the_value():
    made = plan("llama-3-70b", gpus=256)
    advice = advise(made, CONSTANTS)
    assert advice.use_fp8
    assert made.best_fp8.speedup[1] < made.best_fp8.speedup[0] < made.best_fp8.speedup[2]
    assert all("stay in BF16" in change for change in advice.changes)
    assert advise(made, tolerance=0.1).use_fp8 is False


@pytest.mark.long
def test_more_gpus_are_never_slower_in_all():
    totals = [plan(gpus=gpus, global_batch=1024).bf16.tokens_per_s_per_gpu * gpus for gpus in (16, 64, 256, 1024)]
    assert totals == sorted(totals)


@pytest.mark.long
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
    # 6 FLOPs a weight but for the embedding's, and causal attention to 4,096 tokens on average in 32 layers
    flops = 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 4096 * 4096 * 32
    for option in made.record()["options"]:
        if option.get("reason") is None:
            assert option["mfu"] == pytest.approx(option["tokens_per_s_per_gpu"] * flops / 989.4e12, rel=1e-3)


def test_decoding_is_faster_and_smaller_in_fp8():
    request = ServingRequest(
        model=find_model("llama-3-8b"), hardware=find_hardware("h100"), gpus=1, prompt=512, answer=512, load=1e5
    )
    points, refused = serving_points(request, CONSTANTS)
    by_size = {(point.precision, point.requests): point for point in points}
    assert by_size["fp8", 16].token_ms < by_size["bf16", 16].token_ms
    assert by_size["fp8", 16].weights_gb < 0.6 * by_size["bf16", 16].weights_gb
    assert all(point.gpus_needed == math.ceil(1e5 / point.tokens_per_s) for point in points)
    pairs, _ = serving_points(replace(request, gpus=2), CONSTANTS)
    assert all(point.gpus_needed == 2 * math.ceil(1e5 / point.tokens_per_s) for point in pairs)
    assert not refused
    _, refused = serving_points(replace(request, hardware=find_hardware("a100")), CONSTANTS)
    assert "no FP8 units" in refused["fp8"]


def named_by_size(shape):
    """A name that says the size of a shape, as its own name rounds it, and of a mixture what a token meets."""
    named = re.search(r"[\d.]+[bm]$", shape.name)
    sizes = [f"{count / 1e9:.3g}b" for count in (shape.parameters, shape.active_parameters)]
    return f"unheard-{sizes[0]}-a{sizes[1]}" if shape.experts else f"unheard-{named.group() if named else sizes[0]}"


@pytest.mark.parametrize("kind", ["train", "infer"])
@pytest.mark.parametrize("guess", ["dense", "mixture"])
def test_eighty_percent_of_the_table_are_within_the_interval_of_guessed_shapes(monkeypatch, guess, kind):
    """Each model of the table against the shape that its size alone would give it, in the same row."""
    cells = {
        "train": {
            "metric": "step_time_s",
            "hardware": "B300",
            "gpus": 64,
            "micro_batch": 1,
            "dp_or_fsdp": "fsdp64",
            "seq": 4096,
        },
        "infer": {"metric": "tokens_per_s", "hardware": "GB300", "gpus": 16, "seq": "1024/1024", "kind": "infer"},
    }
    cells["train"] |= {"notes": "EP 8", "gpus": 256} if guess == "mixture" else {}
    cells["infer"] |= {"tp": 16} if guess == "mixture" else {"hardware": "H200", "gpus": 8, "tp": 8}
    errors = []
    for shape in map(find_model, model_names()):
        if bool(shape.experts) == (guess == "mixture"):
            values = []
            for each in (shape, find_model(named_by_size(shape))):
                monkeypatch.setattr("octavo.planning.rows.find_model", lambda text, each=each: each)
                values.append(predicted(model=shape.name, precision="bf16", **cells[kind]).value)
            if None not in values:
                errors.append(abs(math.log(values[1] / values[0])))
    assert len(errors) > 25
    assert sorted(errors)[math.ceil(0.8 * len(errors)) - 1] == pytest.approx(GUESSED[guess][kind], abs=0.05)


def test_a_guessed_shape_has_a_wider_interval():
    known, guessed = (predicted(model=name, metric="tokens_per_s") for name in ("Llama-3-8B", "Granite-3.1-8B"))
    assert guessed.high / guessed.value > 1.03 * known.high / known.value


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
        ({"model": "Llama-3-8B", "metric": "hours_for_2500_iters"}, "its batch and its sequence length"),
        ({"model": "Llama-3-8B", "metric": "step_time_s", "seq": 8192}, "depends on its batch, which"),
        ({"model": "Llama-3-8B", "metric": "step_time_s", "micro_batch": 1}, "depends on its sequence length, which"),
        ({"model": "Llama-3.1-405B", "metric": "tokens_per_s", "gpus": ""}, "leaves out its number of GPUs"),
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
        writer.writerows(
            [
                ("id", "kind", "model", "hardware", "metric"),
                ("a", "train", "Llama-3-8B", "H100", "tokens_per_s_per_gpu"),
            ]
        )
    found: Any = predict_row(read_rows(path)[0], CONSTANTS)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("column", ["gpus", "tp", "seq", "micro_batch", "global_batch"])
def test_negative_numbers_are_refused(tmp_path, column):
    path = tmp_path / "rows.csv"
    row = {"id": "a", "kind": "train", "model": "Llama-3-8B", "hardware": "H100", "metric": "step_time_s", column: "-8"}
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    found = predict_row(read_rows(path)[0], CONSTANTS)
    assert found.value is None
    assert found.reason == f"{column} must not be negative, as '-8' is"


@pytest.mark.parametrize("name", hardware_names())
def test_every_kernel_of_every_hardware_takes_longer_than_its_peak(name):
    for kernel in Kernel:
        part = kernel_part(kernel, find_hardware(name))
        assert kernel_constant(part, CONSTANTS.values) > 0.1


@pytest.mark.parametrize("name", hardware_names())
def test_no_plan_gains_more_than_the_peak_of_fp8(name):
    hardware = find_hardware(name)
    made = plan(hardware=name)
    gains = [option.speedup[0] for option in made.options if option.speedup]
    assert bool(gains) == hardware.has_fp8
    assert all(gain < hardware.fp8 / hardware.bf16 for gain in gains)


def test_a_70b_on_mi300x_gains_less_than_the_peak_of_fp8():
    assert plan("llama-3-70b", "mi300x").best_fp8.speedup[0] < 2


@pytest.mark.long
def test_a_row_is_predicted_without_its_id():
    for each in read_rows(PUBLISHED):
        anonymous = Row({**each.cells, "id": "row"})
        assert predict_row(anonymous, CONSTANTS) == replace(predict_row(each, CONSTANTS), id="row")


def test_the_batch_of_bf16_is_read_from_any_two_numbers():
    cells = {"model": "Llama-3.1-8B", "micro_batch": 6, "seq": 8192, "metric": "step_time_s", "hardware": "B200"}
    named = predicted(**cells, notes="bf16 and fp8 8B differ in batch (2 vs 6)")
    alone = predicted(**cells | {"micro_batch": 2, "precision": "bf16"})
    assert named.bf16_value == pytest.approx(alone.value)


@pytest.mark.parametrize(("notes", "overlaps"), [("async TP", True), ("group=x-asynctp; vanilla TP", False)])
def test_asynchronous_tp_is_read_from_the_notes(notes, overlaps):
    job = training_job(row(model="Llama-3.1-70B", gpus=64, tp=8, notes=notes))
    assert job.overlaps_tp is overlaps


@pytest.mark.parametrize(
    ("hardware", "precision", "words"),
    [
        ("A100", "float8 tensorwise", "no FP8 units"),
        ("H100", "mxfp8", "no MX scales"),
        ("H100", "nvfp4", "no FP4 units"),
        ("MI300X", "mxfp8", "no MX scales"),
    ],
)
@pytest.mark.parametrize(
    "cells",
    [
        {"model": "Llama-3-8B", "metric": "step_time_s"},
        {"kind": "infer", "model": "Llama-3-8B", "seq": "128/128", "metric": "tokens_per_s"},
        {"kind": "gemm", "model": "M=4096 N=4096 K=4096", "metric": "time_us"},
    ],
)
def test_a_row_of_a_precision_without_units_is_refused(hardware, precision, words, cells):
    found = predicted(hardware=hardware, precision=precision, **cells)
    assert found.value is None
    assert words in found.reason


KINDS: dict[str, dict[str, object]] = {
    "train": {"model": "Llama-3-8B", "micro_batch": 1, "global_batch": 64, "seq": 4096},
    "infer": {"kind": "infer", "model": "Llama-3-8B", "seq": "1024/128", "micro_batch": 16},
    "gemm": {"kind": "gemm", "model": "M=4096 N=4096 K=4096"},
}


@pytest.mark.parametrize(
    ("kind", "metric"),
    [("train", metric) for metric in ("energy_kwh", "loss", "", "time_to_train_min", "memory_bandwidth_gbps")]
    + [
        ("train", metric)
        for metric in (
            "tokens_per_day",
            "tokens_per_s (min)",
            "steps_per_day",
            "peak_mem",
            "kv_cache_gb",
            "speedup_vs_a100",
        )
    ]
    + [("infer", metric) for metric in ("kv_cache_gb", "ttft", "ttft_p99_ms", "latency_p99_ms", "loss")]
    + [("infer", metric) for metric in ("prefill_joules", "power_w", "step_time_s", "")]
    + [("gemm", metric) for metric in ("gbps", "time", "", "loss", "power_w", "tokens_per_joule")],
)
def test_a_metric_that_is_not_modelled_is_refused(kind, metric):
    found = predicted(metric=metric, **KINDS[kind])
    assert found.value is None
    assert "is not predicted for" in found.reason


@pytest.mark.parametrize(
    ("kind", "metric", "same", "factor"),
    [
        ("train", "step_time_ms", "step_time_s", 1000),
        ("train", "step_time_min", "step_time_s", 1 / 60),
        ("train", "tokens_per_s", "tokens_per_s_per_gpu", 8),
        ("train", "tokens/sec/GPU", "tokens_per_s_per_gpu", 1),
        ("train", "samples_per_s", "tokens_per_s", 1 / 4096),
        ("train", "mfu_percent", "mfu", 100),
        ("train", "MFU (%)", "mfu", 100),
        ("train", "tok_s_gpu", "tokens_per_s_per_gpu", 1),
        ("train", "tps", "tokens_per_s", 1),
        ("train", "TGS", "tokens_per_s_per_gpu", 1),
        ("train", "steps/s", "tokens_per_s", 1 / (64 * 4096)),
        ("train", "step_time (s)", "step_time_s", 1),
        ("train", "elapsed time per iteration (ms)", "step_time_s", 1000),
        ("train", "ms_per_step", "step_time_s", 1000),
        ("train", "sec_per_step", "step_time_s", 1),
        ("train", "TFLOP / sec / GPU", "tflops_per_gpu", 1),
        ("train", "peak memory (GB)", "peak_mem_gb", 1),
        ("train", "max_mem (GiB)", "peak_mem_gb", 1e9 / 1024**3),
        ("train", "wps", "tokens_per_s", 1),
        ("train", "tokens_per_min", "tokens_per_s", 60),
        ("train", "samples/hour", "tokens_per_s", 3600 / 4096),
        ("infer", "req/min", "output_tokens_per_s", 60 / 128),
        ("infer", "output tokens per minute per GPU", "output_tokens_per_s", 60 / 8),
        ("infer", "tokens/min/user", "tokens_per_s_per_user", 60),
        ("infer", "TPOT (ms)", "tpot_ms", 1),
        ("infer", "s_per_token", "tpot_ms", 1e-3),
        ("infer", "req/s", "requests_per_s", 1),
        ("infer", "output tok/s (all GPUs)", "output_tokens_per_s", 1),
        ("infer", "output_tok_s_gpu", "output_tokens_per_s", 1 / 8),
        ("gemm", "latency (us)", "time_us", 1),
        ("train", "peak_mem_gib", "peak_mem_gb", 1e9 / 1024**3),
        ("infer", "requests_per_s", "output_tokens_per_s", 1 / 128),
        ("infer", "itl_us", "tpot_ms", 1000),
        ("infer", "inter_token_latency_ms", "itl_ms", 1),
        ("infer", "latency_s", "tpot_ms", 128 / 1000),
        ("infer", "total_tokens_per_s", "output_tokens_per_s", 9),
        ("gemm", "latency_us (header says ms)", "sum_ms", 1000),
    ],
)
def test_metrics_of_one_thing_agree(kind, metric, same, factor):
    found, other = (predicted(metric=each, **KINDS[kind]) for each in (metric, same))
    assert found.value == pytest.approx(factor * other.value)


def test_memory_without_a_stated_policy_has_the_interval_of_all_policies():
    cells = {"model": "Llama-3-8B", "micro_batch": 4, "seq": 8192, "metric": "peak_mem_gb", "dp_or_fsdp": "fsdp8"}
    guessed = predicted(**cells)
    none, full = (predicted(**cells, notes=f"activation ckpt {word}") for word in ("False", "True"))
    assert guessed.low < guessed.value < guessed.high
    assert guessed.low <= full.value < none.value <= guessed.high
    cells["micro_batch"] = ""
    assert "needs its micro-batch" in predicted(**cells).reason


def test_zero2_keeps_a_copy_of_all_weights():
    job = training_job(row(model="Llama-3-8B", gpus=64, micro_batch=1, precision="bf16", dp_or_fsdp="fsdp64"))
    sizes = {}
    for sharding in (Sharding.FSDP, Sharding.ZERO2):
        each = replace(job, layout=Layout(gpus=64, sharding=sharding))
        sizes[sharding] = training_memory(each, Recompute.FULL)
    assert sizes[Sharding.ZERO2].weights - sizes[Sharding.FSDP].weights == pytest.approx(2 * job.model.parameters)
    assert sizes[Sharding.ZERO2].gradients == sizes[Sharding.FSDP].gradients


def test_a_batch_that_does_not_divide_is_named():
    with pytest.raises(ConfigError, match=r"batch of 510 sequences does not divide among 1,000 GPUs.* use 500 or 625"):
        plan("llama-3-70b", gpus=1000, global_batch=510)


@pytest.mark.parametrize(("kind", "same"), [("Train", "train"), ("training", "train"), ("inference", "infer")])
def test_kinds_in_other_spellings(kind, same):
    metric = {"train": "step_time_s", "infer": "tokens_per_s"}[same]
    found, other = (predicted(**KINDS[same] | {"kind": each, "metric": metric}) for each in (kind, same))
    assert found == other
    assert found.reason is None


def test_an_id_is_given_back_as_it_was(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("id,kind,model,hardware\n a b ,train,Llama-3-8B,H100\n")
    assert predict_row(read_rows(path)[0], CONSTANTS).id == " a b "


@pytest.mark.parametrize(
    "model", ["M=N=K=8192", "(M, N, K) = (8192, 8192, 8192)", "GEMM m8192 n8192 k8192", "8192x8192x8192", "8192³"]
)
def test_products_in_other_spellings(model):
    assert gemm_job(row(kind="gemm", model=model, gpus=1)).shapes == ((8192, 8192, 8192),)


def test_an_unknown_model_has_a_short_reason():
    assert len(predicted(model="nothing known " * 50).reason) < 300
