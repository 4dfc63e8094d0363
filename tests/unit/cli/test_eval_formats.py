"""``octavo eval --compare`` and of models that are no run, as a user's shell would see it."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from octavo import convert
from octavo.cli import compare_formats, console, training_text
from octavo.language_model import load_language_model
from octavo.models.llama_folder import write_tokenizer
from octavo.quantization import calibrate, text_windows
from octavo.quantization.bf16 import round_to_bf16
from octavo.quantization.comparison.comparison import compare
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.quantization.comparison.variants import line_up
from octavo.text.sources import TOPICS
from octavo.text.tokenizer import train_tokenizer
from octavo.training.memory import reset_peak_memory
from tests.unit.cli.conftest import run_octavo
from tests.unit.models import small_gguf

FEW = ["--windows", 3, "--context", 16]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return small_gguf.write(tmp_path_factory.mktemp("model") / "model.gguf")


def test_loss_of_a_gguf_file(octavo, gguf):
    """Of the topics, in FP32, from torch alone."""
    record = json.loads(octavo("eval", gguf, *FEW, "--json").stdout)
    model = load_language_model(gguf)
    windows = evaluation_windows(model, TOPICS, "all", count=3, length=16)
    with torch.no_grad():
        logits = model.logits(windows[:, :-1])
    nats = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    assert record["nats"] == pytest.approx(nats, rel=1e-6)
    assert record["perplexity"] == pytest.approx(math.exp(nats), rel=1e-6)
    assert (record["data"], record["split"], record["tokens"]) == (TOPICS, "all", 45)
    assert "perplexity" in octavo("eval", gguf, *FEW).stdout


@pytest.mark.long
def test_formats_of_a_file(octavo, gguf):
    record = json.loads(octavo("eval", gguf, "--compare", "fp8-dynamic, fp8-kv-centred", *FEW, "--json").stdout)
    model = load_language_model(gguf)
    windows = evaluation_windows(model, TOPICS, "all", count=3, length=16)
    expected = compare(line_up(model, ["bf16", "fp8-dynamic"]), windows)
    rows = {row["name"]: row for row in record["formats"]}
    assert list(rows) == ["bf16", "fp8-dynamic", "fp8-kv-centred"]
    for entry in expected.entries:
        row = rows[entry.name]
        assert row["nats"] == entry.scores.nats
        assert row["agreement"] == entry.scores.agreement
        assert row["divergence"] == entry.scores.divergence
        assert row["file_bytes"] == entry.storage.file_bytes
        assert row["gap"]["standard_error"] == expected.gap(entry.name).standard_error
    assert rows["fp8-dynamic"]["layers"] == 14
    if reset_peak_memory(torch.device("cpu")):
        assert all(row["peak_bytes"] == row["memory_bytes"] + row["pass_bytes"] for row in rows.values())
    assert rows["fp8-kv-centred"]["divergence"] > 0
    assert record["passes"] == []


def test_formats_as_a_table(octavo, gguf):
    shown = octavo("eval", gguf, "--compare", "bf16,fp8-rowwise", *FEW).stdout
    for word in ("fp8-rowwise", "vs BF16", "top-1", "±", "3 windows of 16 tokens", "paired with bf16", "file, MB"):
        assert word in shown
    assert "tokens/s" not in shown


@pytest.mark.long
def test_tables_are_whole_in_eighty_columns(octavo, monkeypatch, gguf):
    monkeypatch.setattr(console, "PIPE_WIDTH", 80)
    shown = octavo("eval", gguf, "--compare", "fp8-kv-centred", "--speed", *FEW).stdout.splitlines()
    rows = [line.split() for line in shown if line.startswith(" fp8-kv-centred")]
    assert [len(row) for row in rows] == [9, 5, 5], shown  # "±" and "%" are words of the first; a cache has no layers


@pytest.mark.long
def test_speed_table_has_latencies_and_notes_emulation(octavo, gguf):
    shown = octavo("eval", gguf, "--compare", "bf16,fp8-dynamic", "--speed", *FEW).stdout
    assert "ms at 1 " in shown
    assert "ms at 16" in shown
    assert "instructions" in shown or "of this GPU" in shown
    record = json.loads(octavo("eval", gguf, "--compare", "bf16", "--speed", *FEW, "--json").stdout)
    assert [(row["name"], row["batch"], row["length"]) for row in record["passes"]] == [
        ("bf16", 1, 16),
        ("bf16", 16, 16),
    ]
    assert all(row["latency_ms"] > 0 and row["tokens_per_second"] > 0 for row in record["passes"])


@pytest.mark.long
def test_formats_of_a_run_on_its_own_test_split(octavo, finished_run, text):
    record = json.loads(octavo("eval", finished_run, "--compare", "bf16,fp8-dynamic", "--windows", 2, "--json").stdout)
    assert (record["data"], record["split"], record["context"]) == (str(text), "test", 32)
    model = load_language_model(finished_run)
    windows = text_windows(model, text, "test", count=2, length=32)
    expected = compare(line_up(model, ["bf16", "fp8-dynamic"]), windows)
    assert [row["nats"] for row in record["formats"]] == [entry.scores.nats for entry in expected.entries]


def test_other_text_for_a_run(octavo, finished_run, tmp_path):
    (tmp_path / "other.txt").write_text("nothing like sums at all\n" * 400)
    arguments = ["--data", tmp_path / "other.txt", "--windows", 2, "--json"]
    record = json.loads(octavo("eval", finished_run, "--compare", "bf16", *arguments).stdout)
    assert record["split"] == "all"


@pytest.mark.long
def test_static_is_calibrated_now_or_from_a_folder(octavo, gguf, tmp_path, monkeypatch):
    """On text that the evaluation does not have; both are the contestant of those scales."""
    (sources := tmp_path / "sources").mkdir()
    (sources / "some.txt").write_text("some words that are read before\n" * 300)
    monkeypatch.setattr(training_text, "LIBRARY_SOURCES", str(sources))
    model = load_language_model(gguf)
    batches = [window[None] for window in text_windows(model, sources, "train", count=2, length=16)]
    calibration = calibrate(model, batches)
    windows = evaluation_windows(model, TOPICS, "all", count=3, length=16)
    wanted = compare(line_up(model, ["bf16", "fp8-static"], calibration=calibration), windows).entry("fp8-static")
    now = octavo("eval", gguf, "--compare", "fp8-static", "--samples", 2, *FEW, "--json")
    assert "calibrate" in now.stderr
    record = json.loads(now.stdout)
    assert record["calibration"] == f"2 windows of {sources}, train"
    assert record["formats"][1]["nats"] == wanted.scores.nats
    calibration.save(tmp_path / "scales")
    arguments = ["--compare", "fp8-static", "--calibration", tmp_path / "scales", *FEW]
    assert json.loads(octavo("eval", gguf, *arguments, "--json").stdout)["formats"][1]["nats"] == wanted.scores.nats
    assert "fp8-static is calibrated on" in octavo("eval", gguf, *arguments).stdout


@pytest.mark.long
def test_means_of_keys_come_from_a_folder(octavo, gguf, tmp_path):
    model = load_language_model(gguf)
    windows = evaluation_windows(model, TOPICS, "all", count=3, length=16)
    calibration = calibrate(model, windows.split(1), kv_cache=True)
    calibration.save(tmp_path)
    wanted = compare(line_up(model, ["bf16", "fp8-kv-centred"], means=calibration.key_means), windows)
    arguments = ["--compare", "fp8-kv-centred", "--calibration", tmp_path, *FEW, "--json"]
    rows = json.loads(octavo("eval", gguf, *arguments).stdout)["formats"]
    assert rows[1]["nats"] == wanted.entry("fp8-kv-centred").scores.nats


@pytest.mark.long
def test_a_tuned_model_comes_from_its_folder(octavo, gguf, tmp_path, monkeypatch):
    def load_qat(folder):
        made = load_language_model(gguf)
        round_to_bf16(made.model)  # without which its codes would be those of the FP32 weights
        convert(made.model, "tensorwise")
        assert folder == tmp_path
        return made

    monkeypatch.setattr(compare_formats, "load_qat", load_qat)
    (tmp_path / "qat.json").write_text(
        json.dumps({"format": 1, "layout": "llama", "layers": []})
    )  # of an older version
    names = "fp8-dynamic,fp8-qat"
    rows = json.loads(octavo("eval", gguf, "--compare", names, "--qat", tmp_path, *FEW, "--json").stdout)["formats"]
    assert rows[2]["layers"] == 14
    assert rows[2]["nats"] == rows[1]["nats"]


def hugging_face_folder(folder, kind):
    """A small model that transformers wrote, biases and all, with a tokenizer of bytes beside it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    words = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "GPT2":
        shape = {"n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**words, **shape))
    else:
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        shape |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
        config = getattr(transformers, f"{kind}Config")(**words, **shape)
        made = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    made.save_pretrained(folder)
    write_tokenizer(folder, train_tokenizer(["some text, some more text"] * 3, vocab_size=300), context=32)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("kind", "linears"), [("Llama", 7), ("Qwen2", 7)])
def test_a_hugging_face_folder_is_evaluated_and_compared(octavo, tmp_path, kind, linears):
    """It holds a tokenizer.json, as a run's folder does."""
    folder = hugging_face_folder(tmp_path, kind)
    alone = octavo("eval", folder, *FEW, "--json")
    assert alone.exit_code == 0, alone.output
    result = octavo("eval", folder, "--compare", "fp32,fp8-dynamic", *FEW, "--json")
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["formats"]}
    assert rows["fp32"]["nats"] == json.loads(alone.stdout)["nats"]
    assert rows["fp8-dynamic"]["layers"] == linears
    assert rows["fp8-dynamic"]["divergence"] > 0


@pytest.mark.long
def test_a_folder_in_fp8_is_no_reference_and_is_not_called_fp32(octavo, gguf, finished_run, tmp_path):
    """BF16 made of codes would be FP8, and FP8 beside it would look free."""
    out = tmp_path / "served"
    assert octavo("export", finished_run, "--no-verify", "--out", out).exit_code == 0
    for names in ("bf16,fp8-static", "fp32", "fp8-kv-centred"):
        result = octavo("eval", out, "--compare", names, *FEW)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "give the high-precision model that they were made from" in " ".join(result.stderr.split())
    record = json.loads(octavo("eval", out, *FEW, "--json").stdout)
    assert record["format"] == "FP8 codes in 7 layers, as stored"
    model = load_language_model(out)
    windows = evaluation_windows(model, TOPICS, "all", count=3, length=16)
    with torch.no_grad():
        logits = model.logits(windows[:, :-1])
    nats = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()).item()
    assert record["nats"] == pytest.approx(nats, rel=1e-6)
    assert json.loads(octavo("eval", gguf, *FEW, "--json").stdout)["format"] == "FP32"


@pytest.mark.long
def test_a_model_of_which_nothing_would_be_quantized_is_refused(octavo, tmp_path):
    folder = hugging_face_folder(tmp_path, "GPT2")
    for name in ("int8", "fp8-dynamic"):
        result = octavo("eval", folder, "--compare", name, *FEW)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "nothing to quantize; its weights are in Conv1D" in result.stderr
    result = octavo("sensitivity", folder, "--out", tmp_path / "mix", "--windows", 2, "--verify-windows", 2)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nothing to quantize; its weights are in Conv1D" in result.stderr


@pytest.fixture(scope="module")
def tuned_run(tmp_path_factory, finished_run, text):
    folder = tmp_path_factory.mktemp("qat") / "tuned"
    options = ["--steps", 2, "--batch-size", 1, "--context", 16, "--eval-windows", 2, "--data", text]
    result = run_octavo("qat", finished_run, "--out", folder, *options)
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.long
def test_tuned_folder_is_a_model_and_a_format(octavo, finished_run, tuned_run):
    """It holds a metrics.jsonl, as a run's folder does."""
    for arguments in ((), ("--compare", "fp8-dynamic")):
        result = octavo("eval", tuned_run, *arguments, *FEW, "--json")
        assert result.exit_code == 0, result.output
    both = ["--compare", "fp8-dynamic,fp8-qat", "--qat", tuned_run, *FEW]
    record = json.loads(octavo("eval", finished_run, *both, "--json").stdout)
    assert record["tuned"] == str(tuned_run)
    assert record["formats"][2]["layers"] == record["formats"][1]["layers"]
    assert "fp8-qat is tuned and bf16 is not" in octavo("eval", finished_run, *both).stdout


def test_a_tuned_folder_of_another_model_is_refused(octavo, gguf, tuned_run):
    result = octavo("eval", gguf, "--compare", "fp8-qat", "--qat", tuned_run, *FEW)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the tuned model is another model" in result.stderr
    assert "leave fp8-qat out" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--compare", "fp4"], "there is no format 'fp4' to compare; use some of fp32, bf16"),
        (["--compare", ""], "there is no format ''"),
        (["--compare", "bf16,bf16"], "distinct formats"),
        (
            ["--compare", "bf16", "--calibration", "x"],
            "--calibration is only used by fp8-static and fp8-kv-centred",
        ),
        (["--compare", "bf16", "--qat", "x"], "--qat is only used by fp8-qat; add it to --compare"),
        (["--compare", "fp8-qat"], "fp8-qat needs a folder of octavo qat; give it with --qat"),
        (["--compare", "bf16", "--windows", "0"], "must be at least 1"),
        (["--compare", "bf16", "--context", "1"], "from 2 to 32 tokens"),
        (["--compare", "bf16", "--context", "0"], "from 2 to 32 tokens"),
        (["--compare", "bf16", "--device", "tpu"], "device must be one of auto, cpu, cuda"),
        (["--compare", "bf16", "--split", "test"], "language-topics has no splits"),
        (["--speed"], "--speed needs --compare"),
        (["--samples", "4"], "--samples needs --compare"),
        (["--data", ""], "--data is empty"),
    ],
)
def test_bad_input_is_one_sentence(octavo, gguf, options, words):
    result = octavo("eval", gguf, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_window_options_without_compare_are_refused_for_a_run(octavo, finished_run):
    for option in ("--windows", "--context"):
        result = octavo("eval", finished_run, option, 4)
        assert result.exit_code == 2
        assert "add --compare" in result.stderr


def test_progress_goes_to_stderr_only(octavo, gguf):
    result = octavo("eval", gguf, "--compare", "bf16", *FEW, "--json")
    assert "evaluate" in result.stderr
    assert json.loads(result.stdout)["reference"] == "bf16"
