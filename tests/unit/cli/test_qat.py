"""``octavo qat`` on a finished run."""

import json

import pytest
import torch

from octavo.quantization import load_qat

SMALL = ["--steps", 3, "--batch-size", 2, "--context", 16, "--eval-windows", 3, "--warmup", 1, "--lr", 1e-3]


def test_it_tunes_measures_and_writes(octavo, finished_run, text, tmp_path):
    out = tmp_path / "new" / "qat"
    result = octavo("qat", finished_run, "--data", text, *SMALL, "--baseline", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["reference"] == "bf16-tuned"
    assert list(record["measured"]) == ["bf16", "fp8", "bf16-tuned", "fp8-of-tuned", "fp8-qat"]
    assert record["measured"]["fp8-qat"]["perplexity"] < record["measured"]["bf16"]["perplexity"]
    loaded = load_qat(out)
    with torch.no_grad():
        assert loaded.logits(torch.arange(8)[None]).isfinite().all()
    settings = json.loads((out / "qat.json").read_text())["settings"]
    assert settings["tuning"]["learning_rate"] == 1e-3
    assert settings["recipe"] == "static"


def test_the_table_says_what_stands_beside_what(octavo, finished_run, text, tmp_path):
    out = tmp_path / "qat"
    options = ["--recipe", "tensorwise", "--distill", 0.5, "--skip", "*.o_proj", "--head"]
    result = octavo("qat", finished_run, "--data", text, *SMALL, *options, "--out", out)
    assert result.exit_code == 0, result.output
    assert "FP8, trained for it" in result.stdout
    assert "tuned" not in result.stdout
    assert "against BF16, as it came" in result.stdout
    assert "tune fp8-qat" in result.stderr
    layers = json.loads((out / "qat.json").read_text())["layers"]
    assert "lm_head" in layers
    assert not any(path.endswith("o_proj") for path in layers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", 0], "steps must be at least 1"),
        (["--recipe", "bf16"], "casts no weight"),
        (["--device", "tpu"], "device must be one of"),
        (["--seed", "99999999999999999999999"], "Invalid value for '--seed'"),
        (["--recipe", "delayed"], "takes its scales from training steps"),
        (["--recipe", "tensorwise", "--scales", "tracked"], "leave --scales out"),
        (["--scales", "guessed"], "scales must be one of"),
        (["--high-precision-share", 1], "leaves none of 3 steps that cast"),
        (["--scales", "learned", "--freeze-share", 1], "lower it, or use scales='frozen'"),
        (["--skip", "nothing.like.it"], "matches no layer"),
        (["--context", 4096], "reads at most"),
        (["--eval-windows", 0], "at least 1"),
        (["--data", "no/such/file.txt"], "there is no file"),
        (["--steps", 100_000], "has too little"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_leaves_nothing(octavo, finished_run, text, tmp_path, *, options, words):
    out = tmp_path / "qat"
    result = octavo("qat", finished_run, "--data", text, *SMALL, *options, "--out", out)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_reads_little_is_tuned_on_what_it_reads(octavo, finished_run, tmp_path):
    """And on the text that it was trained on."""
    few = ["--steps", 1, "--batch-size", 1, "--eval-windows", 2]
    result = octavo("qat", finished_run, *few, "--out", tmp_path / "qat", "--json")
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "qat" / "qat.json").read_text())["settings"]
    assert settings["tuning"]["context"] == 32


def test_a_folder_in_use_is_refused_before_any_work(octavo, tmp_path):
    (tmp_path / "file").touch()
    result = octavo("qat", "no-model.gguf", "--out", tmp_path)
    assert result.exit_code == 2
    assert "is not empty" in " ".join(result.stderr.split())
