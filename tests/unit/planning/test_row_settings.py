"""Settings of a training that rows write in their own ways: layouts, batches, and words in notes."""

from dataclasses import replace
from typing import Any

import pytest

from octavo.planning import fitted_constants, predict_row
from octavo.planning.jobs import Recompute, Sharding
from octavo.planning.precision import BF16
from octavo.planning.rows import Row, framework_of, training_job
from octavo.planning.training_memory import training_memory

CONSTANTS = fitted_constants()
LLAMA = {"model": "Llama-3.1-8B", "gpus": 64, "seq": 8192, "micro_batch": 1, "precision": "float8 tensorwise"}


def row(**cells):
    base = {"id": "row", "kind": "train", "hardware": "H100", "metric": "tokens_per_s_per_gpu"} | LLAMA
    return Row({name: str(value) for name, value in (base | cells).items()})


def job(**cells):
    return training_job(row(**cells))


def predicted(**cells) -> Any:
    return predict_row(row(**cells), CONSTANTS)


def test_a_cell_that_leaves_a_pipeline_one_micro_batch_is_the_ranks_whole_batch():
    pipeline = {"model": "Llama-3.1-405B", "hardware": "H100 96GB", "gpus": 512, "tp": 8, "pp": 8, "notes": "full AC"}
    pipeline |= {"dp_or_fsdp": "fsdp8", "global_batch": 256}
    assert job(micro_batch=32, **pipeline) == job(micro_batch=1, **pipeline)
    assert job(micro_batch=32, **pipeline).micro_batches == 32
    assert predicted(micro_batch=32, **pipeline).reason is None
    assert job(micro_batch=4, **pipeline).micro_batch == 4
    assert job(micro_batch=16, **pipeline | {"pp": 1, "global_batch": 1024}).micro_batch == 16


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_context_parallel_ranks_shard_weights_too(cp):
    """FSDP divides weights among data and context-parallel ranks, and its number counts the former."""
    layout = job(gpus=8, cp=cp, dp_or_fsdp=f"fsdp{8 // cp}").layout
    assert (layout.shard_ranks, layout.sharding) == (8, Sharding.FSDP)
    assert predicted(gpus=8, cp=8, seq=262144, dp_or_fsdp="fsdp1", notes="full AC").reason is None


@pytest.mark.parametrize(
    ("cell", "notes", "ranks", "sharding"),
    [
        ("fsdp16 x dp4", "", 16, Sharding.FSDP),
        ("FSDP2", "", 64, Sharding.FSDP),
        ("", "FSDP2", 64, Sharding.FSDP),
        ("fsdp2 x dp32", "", 2, Sharding.FSDP),
        ("ZeRO-3", "", 64, Sharding.FSDP),
        ("zero stage 3", "", 64, Sharding.FSDP),
        ("FULL_SHARD", "", 64, Sharding.FSDP),
        ("ZeRO-2", "", 64, Sharding.ZERO2),
        ("fsdp64 (SHARD_GRAD_OP)", "", 64, Sharding.ZERO2),
        ("ZeRO-1", "", 64, Sharding.ZERO1),
        ("dp64", "", 64, Sharding.ZERO1),
        ("ddp64", "DDP", 64, Sharding.DDP),
    ],
)
def test_how_weights_are_sharded(cell, notes, ranks, sharding):
    layout = job(dp_or_fsdp=cell, notes=notes).layout
    assert (layout.shard_ranks, layout.sharding) == (ranks, sharding)


def test_states_are_divided_if_they_would_not_fit_and_the_row_does_not_say():
    """2 + 2 bytes of 70 billion weights and gradients on each GPU are more than 80 GB, whatever its optimizer does."""
    large = {"model": "Llama-3.1-70B", "gpus": 128, "notes": "NeMo; full AC"}
    assert job(**large).layout.sharding == Sharding.FSDP
    assert job(**large, dp_or_fsdp="dp128").layout.sharding == Sharding.ZERO1
    assert "would need" in predicted(**large, dp_or_fsdp="dp128").reason
    assert job(**large | {"notes": "NeMo; full AC, ZeRO-1"}).layout.sharding == Sharding.ZERO1
    assert job(notes="NeMo; full AC").layout.sharding == Sharding.ZERO1


def test_a_two_of_two_ranks_is_a_number():
    assert job(gpus=2, dp_or_fsdp="fsdp2").layout.shard_ranks == 2


@pytest.mark.parametrize(
    "notes", ["VP 4; EP 8", "VP=4; EP=8", "VP: 4; EP: 8", "vpp 4, ep8", "VPP=4 expert parallel 8", "EP8 VP4"]
)
def test_numbers_of_settings(notes):
    layout = job(model="Qwen3-30B-A3B", pp=4, notes=notes).layout
    assert (layout.vp, layout.ep) == (4, 8)


@pytest.mark.parametrize(
    ("notes", "policy"),
    [(f"{word}", "full") for word in ("full AC", "AC full", "AC: full", "recompute full", "recompute=full")]
    + [(word, "full") for word in ("activation checkpointing full", "full activation checkpointing", "full-recompute")]
    + [(word, "full") for word in ("activation ckpt True", "gradient checkpointing on")]
    + [(word, "selective") for word in ("selective AC", "AC selective", "recompute selective", "op-level SAC")]
    + [(word, "selective") for word in ("recompute granularity selective", "selective activation checkpointing")]
    + [(word, "none") for word in ("no AC", "AC off", "AC none", "recompute none", "no activation checkpointing")]
    + [(word, "None") for word in ("batch/AC not stated", "AC searched", "compile")],
)
def test_policies_of_recomputation(notes, policy):
    assert str(job(notes=notes).recompute) == policy


@pytest.mark.parametrize("notes", ["no {0}", "not {0}", "without {0}", "{0} off", "{0} disabled", "{0}=0"])
@pytest.mark.parametrize(
    ("word", "field"),
    [("LoRA", "frozen"), ("token drop", "token_drop"), ("async TP", "overlaps_tp")],
)
def test_what_notes_deny(notes, word, field):
    assert getattr(job(notes=notes.format(word)), field) is False
    assert getattr(job(notes=f"full AC; {word}; compile"), field) is True


@pytest.mark.parametrize("notes", ["no FSDP", "FSDP 0", "FSDP=0; DDP", "without FSDP, DDP"])
def test_sharding_that_notes_deny(notes):
    assert job(dp_or_fsdp="dp64", notes=notes).layout.sharding in (Sharding.ZERO1, Sharding.DDP)
    assert job(notes="QLoRA").frozen


@pytest.mark.parametrize(("column", "cell"), [("tp", "8.5"), ("seq", "1e300"), ("gpus", "64.5")])
def test_counts_are_whole(column, cell):
    assert "is not a whole number" in predicted(**{column: cell}).reason


@pytest.mark.parametrize(("cell", "gpus"), [("64,128", 128), ("1,024", 1024), ("16,384", 16384), ("64, 256", 256)])
def test_a_list_of_gpus_is_not_one_number(cell, gpus):
    """Of several sizes of one run the last counts, as of "64/128"; 1,024 is one size."""
    assert row(gpus=cell).integer("gpus") == gpus


@pytest.mark.parametrize(("gpus", "tp", "pp", "cp"), [(8, 8, 1, 2), (8, 1, 1, 16), (48, 8, 4, 1), (64, 3, 1, 1)])
def test_a_layout_that_does_not_divide_the_gpus_is_refused(gpus, tp, pp, cp):
    reason = predicted(gpus=gpus, tp=tp, pp=pp, cp=cp).reason
    assert reason == f"{gpus} GPUs are not a multiple of TP {tp} × PP {pp} × CP {cp}"


@pytest.mark.parametrize(("column", "cell"), [("gpus", "64 GPUs"), ("seq", "8192 tokens"), ("global_batch", "64 seqs")])
def test_counts_with_their_unit(column, cell):
    assert predicted(**{column: cell}) == predicted(**{column: cell.split()[0]})


def test_a_figure_of_one_gpu_without_their_number_is_of_the_fewest_that_do():
    found = predicted(model="Llama-3.1-70B", gpus="", dp_or_fsdp="fsdp", micro_batch="", notes="full AC")
    assert found.reason is None
    assert (
        found.value
        == predicted(model="Llama-3.1-70B", gpus=32, dp_or_fsdp="fsdp", micro_batch="", notes="full AC").value
    )


@pytest.mark.parametrize(
    "metric",
    [
        "tokens_per_s (node)",
        "tokens_per_s (per node)",
        "tokens_per_s (one GPU)",
        "tokens_per_s (x1000)",
        "step_time_s (forward only)",
        "step_time_s (p99)",
        "peak_mem_gb (all GPUs)",
        "tokens_per_s (8 GPUs of 64)",
    ],
)
def test_what_stands_in_parentheses_is_refused_unless_it_is_known(metric):
    assert "is not predicted" in predicted(metric=metric).reason


def test_known_words_in_parentheses():
    assert predicted(metric="tokens_per_s (per GPU)").value == predicted(metric="tokens_per_s_per_gpu").value
    assert predicted(metric="tokens_per_s (mean, all GPUs)").value == predicted(metric="tokens_per_s").value
    service = {"kind": "infer", "seq": "1024/1024", "micro_batch": 16, "gpus": 1, "source_repo_or_doc": "vllm"}
    outputs = [predicted(metric=each, **service).value for each in ("tokens_per_s (output)", "output_tokens_per_s")]
    assert outputs[0] == outputs[1]
    assert predicted(metric="tokens_per_s", **service).value == pytest.approx(2 * outputs[0])
    prefill = [
        predicted(metric=each, **service | {"micro_batch": 1}).value
        for each in ("tokens_per_s (prefill)", "prefill_tokens_per_s")
    ]
    assert prefill[0] == prefill[1]
    for metric in ("tokens_per_s (decode)", "latency_ms (p99)"):
        assert "is not predicted" in predicted(metric=metric, **service).reason


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"tp": 64}, "64 tensor-parallel ranks are more than the 32 heads"),
        ({"pp": 64}, "64 pipeline stages are more than the 32 layers"),
        ({"global_batch": 1}, "64 data-parallel ranks are more than the 1 sequences"),
        ({"model": "Qwen3-30B-A3B", "gpus": 256, "notes": "EP 256"}, "256 expert-parallel ranks are more than the 128"),
    ],
)
def test_more_ranks_than_parts_are_refused(cells, words):
    assert words in predicted(**cells).reason


@pytest.mark.parametrize(
    ("notes", "framework"),
    [
        ("torch.compile vs eager 1.2x", "torchtitan"),
        ("eager mode baseline 900", "torchtitan"),
        ("compared with megatron", "torchtitan"),
        ("NeMo tokenizer", "torchtitan"),
        ("huggingface datasets", "torchtitan"),
        ("NeMo 25.11", "megatron"),
        ("eager", "eager"),
        ("TRT-LLM", "tensorrt-llm"),
    ],
)
def test_the_program_that_ran(notes, framework):
    assert str(framework_of(row(notes=notes))) == framework


def test_all_gpus_of_a_row_in_parentheses():
    assert predicted(gpus=8, metric="tokens_per_s (8 GPUs)").value == predicted(gpus=8, metric="tokens_per_s").value
    assert "is not predicted" in predicted(gpus=8, metric="peak_mem_gb (8 GPUs)").reason


UNFILLED = [
    {"model": "Llama-3.1-8B", "gpus": 64, "dp_or_fsdp": "fsdp64"},
    {"model": "Llama-3.1-8B", "gpus": 8, "dp_or_fsdp": "fsdp8", "notes": "full AC"},
    {"model": "Llama-3.1-8B", "gpus": 64, "dp_or_fsdp": "fsdp64", "global_batch": 64},
    {"model": "Llama-3.1-8B", "gpus": 32, "tp": 2, "pp": 2, "dp_or_fsdp": "dp8"},
    {"model": "Llama-3.1-70B", "gpus": 256, "dp_or_fsdp": "fsdp256"},
    {"model": "Llama-3.1-1B", "gpus": 8, "dp_or_fsdp": "fsdp8", "seq": 2048},
    {"model": "Mixtral-8x7B", "gpus": 64, "dp_or_fsdp": "dp64", "notes": "NeMo; EP 8"},
]


@pytest.mark.parametrize("cells", UNFILLED)
@pytest.mark.parametrize("precision", ["float8 tensorwise", "float8 rowwise", "fp8 delayed scaling"])
def test_a_speedup_is_the_ratio_of_two_rates_where_the_micro_batch_is_left_out(cells, precision):
    """A published comparison changes the precision alone."""
    left_out = cells | {"micro_batch": ""}
    fp8, bf16 = (predicted(**left_out, precision=each) for each in (precision, "bf16"))
    gain = predicted(**left_out, precision=precision, metric="speedup")
    assert gain.value == pytest.approx(fp8.value / bf16.value)
    assert fp8.bf16_value == pytest.approx(bf16.value)


@pytest.mark.parametrize("cells", UNFILLED)
def test_what_is_left_out_is_the_least_recomputation_and_then_the_largest_micro_batch(cells):
    """Nothing less fits one sequence into 95 % of 80 GB, and no more sequences fit, in BF16."""
    step = job(**cells | {"micro_batch": ""}).at(BF16)
    assert step.recompute is not None

    def fits(policy: Recompute, sequences: int) -> bool:
        # the global batch keeps its number of micro-batches, which is all that memory takes from it
        batch = sequences * step.micro_batches * step.layout.dp
        each = replace(step, micro_batch=sequences, global_batch=batch)
        return training_memory(each, policy).total <= 0.95 * 80e9

    less = list(Recompute)[: list(Recompute).index(step.recompute)]
    assert not any(fits(policy, 1) for policy in less) or "full AC" in cells.get("notes", "")
    assert fits(step.recompute, step.micro_batch)
    limits = (step.micro_batch * step.seq >= 32768, "global_batch" in cells)
    assert any(limits) or not fits(step.recompute, 2 * step.micro_batch)
    assert step.micro_batches * step.micro_batch * step.layout.dp == step.global_batch


def test_no_micro_batch_is_larger_than_a_ranks_share_of_the_batch_that_is_stated():
    assert job(gpus=64, global_batch=64, micro_batch="").micro_batch == 1
    assert job(gpus=8, global_batch=48, seq=1024, micro_batch="").micro_batch == 2, "of 6 sequences a rank"
    pipeline = {"gpus": 32, "tp": 2, "pp": 2, "seq": 1024, "micro_batch": ""}
    found = [job(global_batch=batch, **pipeline) for batch in (8 * 16, 8 * 32)]
    assert [(each.micro_batch, each.micro_batches) for each in found] == [(1, 16), (2, 16)], "eight a stage"
    assert job(gpus=8, global_batch="n/a", micro_batch="") == job(gpus=8, micro_batch="")


@pytest.mark.parametrize("cell", ["-", "n/a", "unknown", "dp", "not stated"])
def test_a_cell_without_a_number_or_a_name_says_nothing_of_sharding(cell):
    large = {"model": "Llama-3.1-70B", "gpus": 128, "notes": "NeMo; full AC"}
    assert job(**large, dp_or_fsdp=cell) == job(**large)
    assert job(**large, dp_or_fsdp=cell).layout.sharding == Sharding.FSDP


@pytest.mark.parametrize(
    ("notes", "sharding"),
    [("", "fsdp"), ("NeMo", "zero1"), ("MaxText", "fsdp"), ("llm-foundry", "fsdp"), ("eager", "fsdp")],
)
def test_a_row_that_says_nothing_is_divided_as_its_programs_published_trainings(notes, sharding):
    assert str(job(notes=notes).layout.sharding) == sharding


def test_a_step_on_unstated_gpus_is_refused_for_that():
    reason = predicted(gpus="", tp=8, pp=4, metric="step_time_s", notes="EP 8").reason
    assert reason == "the row leaves out its number of GPUs, of which TP 8 × PP 4 × CP 1 are one copy"
    few = predicted(model="Qwen3-30B-A3B", gpus=2, pp=4, notes="EP 8").reason
    assert few == "2 GPUs are not a multiple of TP 1 × PP 4 × CP 1"
    assert predicted(gpus="", tp=8, pp=4, metric="speedup").reason is None


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("global_batch", "1048576 tokens", "global_batch '1048576 tokens' is in tokens; give sequences"),
        ("global_batch", "64 gpus", "is in gpus; give sequences"),
        ("micro_batch", "4096 tokens", "is in tokens; give sequences"),
        ("seq", "64 sequences", "seq '64 sequences' is in sequences; give tokens"),
        ("tp", "2 tokens", "tp '2 tokens' is in tokens; give gpus"),
        ("gpus", "64 samples", "is in samples; give gpus"),
        ("seq", "4096/128", "seq '4096/128' has several lengths; a training's sequences have one"),
        ("seq", "4k + 128", "has several lengths"),
    ],
)
def test_a_unit_of_another_column_is_refused(column, cell, words):
    assert words in predicted(**{column: cell}).reason


@pytest.mark.parametrize(
    ("cell", "words"),
    [("fsdp64", "'fsdp64'"), ("dp8 (ep8)", "'dp8'"), ("64", "'64'"), ("fsdp64 x dp4", "'fsdp64'"), ("ddp2", "'ddp2'")],
)
def test_data_parallel_ranks_are_not_of_an_unstated_number_of_gpus(cell, words):
    wanted = f"the row leaves out its number of GPUs, of which {words} are data-parallel ranks"
    assert predicted(gpus="", dp_or_fsdp=cell, metric="step_time_s", global_batch=64).reason == wanted


@pytest.mark.parametrize("cell", ["", "1", "dp1", "FSDP2", "fsdp", "ZeRO-2"])
def test_a_way_to_divide_states_is_no_number_of_gpus(cell):
    cells = {"model": "SmolLM2-135M", "gpus": "", "metric": "step_time_s", "global_batch": 64}
    assert predicted(dp_or_fsdp=cell, **cells).reason is None
