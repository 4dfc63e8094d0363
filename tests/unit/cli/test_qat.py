"""``octavo qat`` on a finished run."""

import importlib
import json
import os
import shutil
import subprocess
from contextlib import suppress

import pytest
import torch
from safetensors import SafetensorError

from octavo.models import llama_folder
from octavo.nn import Linear
from octavo.numerics import PerRow
from octavo.quantization import load_qat
from octavo.quantization.qat import folder as qat_folder

command = importlib.import_module("octavo.cli.qat")

SMALL = ["--steps", 3, "--batch-size", 2, "--context", 16, "--eval-windows", 3, "--warmup", 1, "--lr", 1e-3]


def test_qat_tunes_measures_and_writes(octavo, finished_run, text, tmp_path):
    out = tmp_path / "new" / "qat"
    options = ["--granularity", "row", "--baseline"]
    result = octavo("qat", finished_run, "--data", text, *SMALL, *options, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["reference"] == "bf16-tuned"
    assert list(record["measured"]) == ["bf16", "fp8", "bf16-tuned", "fp8-of-tuned", "fp8-qat"]
    assert record["measured"]["fp8-qat"]["perplexity"] < record["measured"]["bf16"]["perplexity"]
    loaded = load_qat(out)
    layers = [layer for layer in loaded.model.modules() if isinstance(layer, Linear)]
    casts = [layer.recipe.output.b for layer in layers]
    assert all(cast is not None and cast.granularity == PerRow() for cast in casts)
    with torch.no_grad():
        assert loaded.logits(torch.arange(8)[None]).isfinite().all()
    settings = json.loads((out / "qat.json").read_text())["settings"]
    assert settings["tuning"]["learning_rate"] == 1e-3
    assert settings["recipe"] == "static"


def test_table_titles_name_the_variants(octavo, finished_run, text, tmp_path):
    out = tmp_path / "qat"
    options = ["--recipe", "tensorwise", "--distill", 0.5, "--skip", "*.o_proj", "--head"]
    result = octavo("qat", finished_run, "--data", text, *SMALL, *options, "--out", out)
    assert result.exit_code == 0, result.output
    assert "FP8 after QAT" in result.stdout
    assert "tuned" not in result.stdout
    assert "compared with original BF16" in result.stdout
    assert "tune fp8-qat" in result.stderr
    layers = json.loads((out / "qat.json").read_text())["layers"]
    assert "lm_head" in layers
    assert not any(path.endswith("o_proj") for path in layers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", 0], "steps must be at least 1"),
        (["--recipe", "bf16"], "casts no weight"),
        (["--granularity", "column"], "weight_granularity must be one of"),
        (["--recipe", "tensorwise", "--granularity", "row"], "--granularity needs recipe 'static', not 'tensorwise'"),
        (["--as-served-by", "vllm-token", "--granularity", "row"], "--granularity and --as-served-by both define"),
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
        (["--steps", 100_000], "too few for"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_leaves_nothing(octavo, finished_run, text, tmp_path, *, options, words):
    out = tmp_path / "qat"
    result = octavo("qat", finished_run, "--data", text, *SMALL, *options, "--out", out)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_default_context_is_limited_by_the_model(octavo, finished_run, tmp_path):
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


@pytest.fixture
def tuning(finished_run, text):
    return ["qat", finished_run, "--data", text, *SMALL]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where a result is kept that its own disk does not take."""
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def check_kept(result, out, home):
    """One sentence that says where; all numbers; a model that loads; nothing where it should have been."""
    assert result.exit_code == 2, result.output
    (kept,) = home.iterdir()
    sentence = result.stderr.strip().splitlines()[-1]
    assert f"cannot use '{out}': No space left on device; the result is kept in '{kept}'" in sentence
    record = json.loads(result.stdout)
    assert record["out"] == str(kept)
    assert record["measured"]["fp8-qat"]["perplexity"] > 1
    assert load_qat(kept).logits(torch.arange(8)[None]).isfinite().all()
    assert not out.exists()


@pytest.mark.parametrize("module", [llama_folder, qat_folder])
def test_result_is_saved_elsewhere_if_the_disk_is_full(octavo, tuning, tmp_path, monkeypatch, home, *, module):
    """At the weights, and at the scales, as the library says it."""
    save_file, out = module.save_file, tmp_path / "full" / "qat"

    def full(tensors, path, **how):
        if tmp_path / "full" in path.parents:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path, **how)

    monkeypatch.setattr(module, "save_file", full)
    result = octavo(*tuning, "--out", out, "--json")
    check_kept(result, out, home)
    assert not (tmp_path / "full").exists()


def test_unsaved_result_is_reported_in_one_sentence(octavo, tuning, tmp_path, monkeypatch, home):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(llama_folder, "save_file", full)
    result = octavo(*tuning, "--out", tmp_path / "qat")
    assert result.exit_code == 2, result.output
    assert "error: cannot use" in result.stderr
    assert "qat/model.safetensors: no space left on device" in result.stderr
    assert ".writing" not in result.stderr
    assert list(home.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of a size."""
    place = tmp_path / "small"
    place.mkdir()

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here: it takes root")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


def test_disk_space_is_checked_before_tuning(octavo, tuning, small_disk, home):
    place = small_disk("100k")
    result = octavo(*tuning, "--out", place / "qat")
    assert result.exit_code == 2, result.output
    assert f"the disk of '{place / 'qat'}' has 0 MiB free, and the result takes" in result.stderr
    assert "tune" not in result.stderr
    assert list(place.iterdir()) == list(home.iterdir()) == []


def test_full_disk_at_the_end_saves_elsewhere(octavo, tuning, small_disk, monkeypatch, home):
    place = small_disk("8m")
    run_qat = command.run_qat

    def filling(*arguments, **options):
        result = run_qat(*arguments, **options)
        with suppress(OSError), (place / "others").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(shutil.disk_usage(place).free // 2 + 1))
        return result

    monkeypatch.setattr(command, "run_qat", filling)
    result = octavo(*tuning, "--out", place / "qat", "--json")
    check_kept(result, place / "qat", home)
    assert [path.name for path in place.iterdir()] == ["others"]
