"""Names, numbers, metrics and precisions as people write them: read rightly, or refused by one sentence."""

import pytest

from octavo.errors import ConfigError
from octavo.planning import Row, find_model, fitted_constants, predict_row
from octavo.planning.precision import BF16, find_precision

TRAINING = {"id": "x", "kind": "train", "model": "Llama-3-8B", "hardware": "H100", "gpus": "8", "seq": "8192",
            "micro_batch": "1", "dp_or_fsdp": "fsdp8", "precision": "fp8 tensorwise", "metric": "tokens_per_s_per_gpu",
            "global_batch": "64"}  # fmt: skip
SERVICE = {"id": "x", "kind": "infer", "model": "Llama-3.1-8B", "hardware": "H100", "gpus": "1", "tp": "1",
           "seq": "1024/1024", "precision": "fp8", "metric": "output_tokens_per_s"}  # fmt: skip


def value(cells, **changes):
    found = predict_row(Row(cells | changes), fitted_constants())
    assert found.reason is None
    return found.value


def reason(cells, **changes):
    found = predict_row(Row(cells | changes), fitted_constants())
    assert found.value is None
    return found.reason


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("DeepSeek-R1-Distill-Llama-70B", "llama-3-70b"),
        ("Llama-3.1-Nemotron-70B-Instruct", "llama-3-70b"),
        ("Phi-4-mini", "phi-4-mini"),
        ("ViT-L/16", "vit-l"),
        ("DiT-XL/2", "dit-xl"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("bloom-7b1", "like a 7b1 model (guessed shape)"),
        ("BLOOM-560m", "like a 560m model (guessed shape)"),
        ("Command-R7B", "like a 7b model (guessed shape)"),
        ("GLM-4-32B", "like a 32b model (guessed shape)"),
        ("GPT-NeoX-1.3B", "like a 1.3b model (guessed shape)"),
        ("Hunyuan-7B", "like a 7b model (guessed shape)"),
        ("DeepSeek-R1-Distill-Qwen-1.5B", "qwen-2-1.5b"),
    ],
)
def test_a_name_never_means_a_model_of_another_size(text, name):
    assert find_model(text).name == name


def test_a_size_alone_has_few_key_heads_as_models_of_today():
    assert find_model("Granite-3.1-8B").key_heads == 8
    like, known = (value(SERVICE, model=name) for name in ("Granite-3.1-8B", "Llama-3.1-8B"))
    assert like == pytest.approx(known, rel=0.3)


def test_the_number_of_active_parameters_is_no_size():
    assert find_model("Qwen1.5-MoE-A2.7B").parameters == pytest.approx(14.3e9, rel=0.01)


def test_layers_that_are_left_are_counted():
    assert find_model("Llama 3 70B 2 layers").layers == find_model("Llama 3 70B cut to 2 layers").layers == 2
    assert find_model("Llama 3 70B, 80 layers").layers == 80


@pytest.mark.parametrize("changes", [{"seq": "8,192"}, {"seq": "8k"}, {"seq": "8192 (packed)"}])
def test_numbers_as_people_write_them(changes):
    assert value(TRAINING, **changes) == value(TRAINING)


@pytest.mark.parametrize("changes", [{"seq": "2^13"}, {"gpus": "8 nodes"}, {"gpus": "16x8"}, {"global_batch": "1 024"}])
def test_what_is_no_number_is_refused(changes):
    assert "is not a number such as 8192" in reason(TRAINING, **changes)


@pytest.mark.parametrize(
    ("metric", "same", "factor"),
    [
        ("MFU (%)", "mfu", 100),
        ("tok_s_gpu", "tokens_per_s_per_gpu", 1),
        ("TGS", "tokens_per_s_per_gpu", 1),
        ("tps", "tokens_per_s", 1),
        ("step_time (s)", "step_time_s", 1),
        ("ms_per_step", "step_time_s", 1000),
        ("sec_per_step", "step_time_s", 1),
        ("elapsed time per iteration (ms)", "step_time_s", 1000),
        ("TFLOP / sec / GPU", "tflops_per_gpu", 1),
        ("peak memory (GB)", "peak_mem_gb", 1),
        ("max_mem (GiB)", "peak_mem_gib", 1),
    ],
)
def test_metrics_as_people_write_them(metric, same, factor):
    assert value(TRAINING, metric=metric) == pytest.approx(factor * value(TRAINING, metric=same))


def test_steps_a_second_are_no_seconds_a_step():
    assert value(TRAINING, metric="steps/s") == pytest.approx(1 / value(TRAINING, metric="step_time_s"))
    assert value(SERVICE, metric="req/s") == pytest.approx(value(SERVICE) / 1024)


def test_replicas_serve_as_much_as_they_are_many():
    one, pair = value(SERVICE), {"model": "Llama-3.1-70B", "tp": "4"}
    assert value(SERVICE, gpus="8") == pytest.approx(8 * one)
    assert value(SERVICE, gpus="8", metric="output_tokens_per_s_per_gpu") == pytest.approx(one)
    assert value(SERVICE, gpus="8", **pair) == pytest.approx(2 * value(SERVICE, gpus="4", **pair))
    assert value(SERVICE, gpus="8", global_batch="64") == pytest.approx(8 * value(SERVICE, global_batch="8"))
    assert "pipelines of inference are not modelled" in reason(SERVICE, gpus="8", pp="2")
    assert "8 GPUs are not a multiple of the 3" in reason(SERVICE, gpus="8", tp="3")


def test_latent_attention_is_replicated_at_the_highest_throughput():
    service = SERVICE | {"model": "DeepSeek-R1", "hardware": "H200", "gpus": "8", "tp": "8"}
    assert value(service) == value(service, notes="DEP8") > 2 * value(service, notes="TP attention")


@pytest.mark.parametrize(
    ("text", "bits", "stored"),
    [
        ("w8a16", 16, 8),
        ("int4 AWQ", 16, 4),
        ("GPTQ", 16, 4),
        ("w4a8", 8, 4),
        ("fp8_w8a8", 8, 8),
        ("weight-only", 16, 8),
    ],
)
def test_bits_of_operands_and_of_stored_weights(text, bits, stored):
    precision = find_precision(text)
    assert (precision.bits, precision.stored_bits) == (bits, stored)
    assert not precision.is_bf16


def test_mxfp4_is_weights_alone_but_on_blackwell():
    assert find_precision("mxfp4").bits == 16
    assert find_precision("mxfp4", generation="blackwell").bits == 4
    assert value(SERVICE, hardware="A100", precision="int4 awq", micro_batch="1") > value(
        SERVICE, hardware="A100", precision="bf16", micro_batch="1"
    )


@pytest.mark.parametrize("text", ["fp32", "tf32", "mxfp6", "int2", "something"])
def test_an_unknown_precision_is_no_bf16(text):
    with pytest.raises(ConfigError, match="is not known; known are bf16"):
        find_precision(text)


@pytest.mark.parametrize("text", ["", "bf16", "BF16-mixed", "fp16", "bfloat16", "not stated (a table)", "half"])
def test_high_precision_by_its_names(text):
    assert find_precision(text) is BF16


@pytest.mark.parametrize("text", ["E5M2", "TE", "hybrid", "per-tensor", "MS-AMP O2", "fp8_mx"])
def test_fp8_by_its_other_names(text):
    assert find_precision(text).bits == 8
    assert not find_precision(text).is_bf16
