"""``octavo eval`` and ``octavo generate`` on a finished run."""

import json
import shutil
from typing import Any

import pytest
import torch

from octavo.inference import ModelRunner
from octavo.inference import generate as continue_by_runner
from octavo.models import generate, load_gguf
from octavo.quantization import load_calibration
from octavo.text.corpus import Split
from octavo.text.tokens import open_data
from octavo.training.run_folder import load_run
from tests.unit.models import small_gguf


def test_eval_is_the_loss_on_the_runs_own_test_split(octavo, finished_run):
    record = json.loads(octavo("eval", finished_run, "--json").stdout)
    run = load_run(finished_run)
    inputs, targets = open_data(finished_run / "data").windows(32, split=Split.TEST)
    with torch.no_grad(), run.surroundings:
        logits = torch.cat([run.model(rows) for rows in inputs.split(16)])
    nats = -logits.float().log_softmax(-1).gather(-1, targets[..., None]).double().mean().item()
    assert record["nats"] == pytest.approx(nats, rel=1e-5)
    assert record["tokens"] == targets.numel()
    assert record["split"] == "test"


def test_eval_takes_all_of_other_text(octavo, finished_run, tmp_path):
    (tmp_path / "other.txt").write_text("nothing like sums at all\n" * 200)
    record = json.loads(octavo("eval", finished_run, "--data", tmp_path / "other.txt", "--json").stdout)
    own = json.loads(octavo("eval", finished_run, "--json").stdout)
    assert record["split"] == "all"
    assert record["nats"] > own["nats"]


def test_eval_prints_a_table(octavo, finished_run):
    assert "perplexity" in octavo("eval", finished_run).stdout


def test_generate_is_reproducible(octavo, finished_run):
    arguments = ["generate", finished_run, "--prompt", "12 times", "--max-new-tokens", 20, "--seed", 3]
    first, second = octavo(*arguments), octavo(*arguments)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("12 times")
    assert first.stdout == second.stdout
    assert octavo(*arguments[:-1], 4).stdout != first.stdout


def test_streamed_text_matches_text_at_once(octavo, finished_run):
    """At temperature 0 nothing is random: 20 tokens in pieces are the argmax continuation."""
    text = octavo("generate", finished_run, "--prompt", "12 times", "--max-new-tokens", 20, "--temperature", 0).stdout
    run = load_run(finished_run)
    ids = run.tokenizer.encode("12 times", add_special_tokens=False).ids
    start = len(ids)
    with torch.no_grad(), run.surroundings:
        for _ in range(20):
            ids.append(int(run.model(torch.tensor([ids[-32:]]))[0, -1].argmax()))
    assert text == "12 times" + run.tokenizer.decode(ids[start:]).rstrip("\ufffd") + "\n"


def test_characters_of_several_bytes_are_written_whole(octavo, finished_run):
    """A hot sampler of bytes cuts characters anywhere; the pieces join to the decoding of all tokens."""
    arguments = ["--prompt", "12 times", "--max-new-tokens", 60, "--temperature", 5, "--top-k", 300, "--seed", 1]
    run = load_run(finished_run)
    ids = run.tokenizer.encode("12 times", add_special_tokens=False).ids
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"temperature": 5.0, "top_k": 300, "generator": generator, "context": 32}
    with run.surroundings:
        text = run.tokenizer.decode(list(generate(run.model, ids, max_new_tokens=60, **options)))
    assert octavo("generate", finished_run, *arguments).stdout == "12 times" + text.rstrip("\ufffd") + "\n"


def test_run_trained_on_gpu_generates_on_cpu_with_a_note(octavo, finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    config = run / "config.toml"
    text = config.read_text()
    assert 'device = "auto"' in text
    config.write_text(text.replace('device = "auto"', 'device = "cuda"'))
    arguments = ["--prompt", "12 times", "--max-new-tokens", 8, "--seed", 3]
    result, expected = octavo("generate", run, *arguments), octavo("generate", finished_run, *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.stdout
    assert "octavo generates on the CPU; serve on a GPU with vLLM, TensorRT-LLM or Triton" in result.stderr
    assert "GPU" not in expected.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-k", "0"], "top_k"),
        (["--max-new-tokens", "-3"], "max_new_tokens"),
        (["--prompt", ""], "the prompt '' has no token to continue; give some text"),
        (["--prompt", "\udcff"], "not UTF-8"),
        (["--seed", "99999999999999999999999"], "seed must be"),
    ],
)
def test_bad_sampling_values_are_named(octavo, finished_run, options, words):
    result = octavo("generate", finished_run, "--prompt", "x", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["eval"], ["generate", "--prompt", "x"]])
def test_a_folder_without_a_run_is_named(octavo, tmp_path, command):
    result = octavo(command[0], tmp_path / "nowhere", *command[1:])
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.output


def test_an_unknown_split_is_refused(octavo, finished_run):
    result = octavo("eval", finished_run, "--split", "dev")
    assert result.exit_code == 2
    assert "train, validation, test, all" in result.stderr


def test_short_text_is_not_called_a_split(octavo, finished_run, tmp_path):
    (tmp_path / "short.txt").write_text("few\n")
    result = octavo("eval", finished_run, "--data", tmp_path / "short.txt", "--split", "all")
    assert result.exit_code == 2
    assert "all of " in result.stderr
    assert "test split" not in result.stderr


def test_eval_of_an_empty_source_is_refused(octavo, finished_run):
    assert octavo("eval", finished_run, "--data", "").exit_code == 2


def test_generate_reads_gguf_files(octavo, tmp_path):
    """A file's model continues a prompt as the runner does; a file that is none is named."""
    path = tmp_path / "model.gguf"
    small_gguf.write(path)
    arguments = ["generate", path, "--prompt", "the 12", "--max-new-tokens", 6, "--temperature", 0]
    result = octavo(*arguments)
    assert result.exit_code == 0, result.output
    loaded = load_gguf(path)
    ids = loaded.tokenizer.encode("the 12").ids
    new = list(
        continue_by_runner(ModelRunner(loaded.model), ids, max_new_tokens=6, temperature=0.0, stop_id=loaded.eos_id)
    )
    assert result.stdout == "the 12" + loaded.tokenizer.decode(new).rstrip("\ufffd") + "\n"
    path.write_bytes(b"not a model")
    assert octavo(*arguments).exit_code == 2


def test_generate_takes_the_means_of_a_calibration(octavo, finished_run, tmp_path):
    path, text = small_gguf.write(tmp_path / "model.gguf"), tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n % 7}, {n * n}.\n" for n in range(3000)))
    calibrated = ["--data", text, "--samples", 4, "--context", 16]
    for out, options in ((tmp_path / "with", ["--kv-cache"]), (tmp_path / "without", [])):
        assert octavo("calibrate", path, *calibrated, "--split", "all", *options, "--out", out).exit_code == 0
    arguments = ["--prompt", "the 12", "--max-new-tokens", 6, "--temperature", 0, "--calibration"]
    loaded = load_gguf(path)
    runner = ModelRunner(loaded.model, key_means=load_calibration(tmp_path / "with").means_of_keys(loaded.model))
    ids = loaded.tokenizer.encode("the 12").ids
    new = list(continue_by_runner(runner, ids, max_new_tokens=6, temperature=0.0, stop_id=loaded.eos_id))
    result = octavo("generate", path, *arguments, tmp_path / "with")
    assert result.stdout == "the 12" + loaded.tokenizer.decode(new).rstrip("\ufffd") + "\n"
    for model, folder, words in (
        (path, "without", "no means of keys; octavo calibrate --kv-cache computes them"),
        (path, "nowhere", "nowhere"),
        (finished_run, "with", "--calibration does not apply to a run"),
    ):
        result = octavo("generate", model, *arguments, tmp_path / folder)
        assert result.exit_code == 2
        assert words in result.stderr


def test_generate_stops_at_the_end_token(octavo, tmp_path):
    """The token that was the third of a text is called its end: two are left."""
    arguments = ["--prompt", "the 12", "--max-new-tokens", 6, "--temperature", 0]
    path = small_gguf.write(tmp_path / "model.GGUF")
    loaded = load_gguf(path)
    ids = loaded.tokenizer.encode("the 12").ids
    new = list(continue_by_runner(ModelRunner(loaded.model), ids, max_new_tokens=6, temperature=0.0))
    assert new[2] not in new[:2]
    small_gguf.write(path, settings={"tokenizer.ggml.eos_token_id": new[2]})
    wanted = "the 12" + loaded.tokenizer.decode(new[:2]).rstrip("\ufffd") + "\n"
    assert octavo("generate", path, *arguments).stdout == wanted
    assert wanted != "the 12" + loaded.tokenizer.decode(new).rstrip("\ufffd") + "\n"


def test_generate_refuses_an_empty_prompt(octavo, tmp_path):
    result = octavo("generate", small_gguf.write(tmp_path / "model.gguf"), "--prompt", "")
    assert result.exit_code == 2
    assert "the prompt '' has no token to continue; give some text" in result.stderr
