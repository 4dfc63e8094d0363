"""``octavo calibrate`` as a user runs it."""

import json
import os
from pathlib import Path

import pytest
import torch

from octavo.cli import training_text as runs
from octavo.language_model import load_language_model
from octavo.models.llama_folder import write_llama, write_tokenizer
from octavo.quantization import calibrate, coverage, load_calibration, text_windows
from tests.unit.models import small_gguf


@pytest.mark.long
def test_scales_match_the_api(octavo, finished_run, text, tmp_path):
    out = tmp_path / "out"
    result = octavo(
        "calibrate", finished_run, "--data", text, "--samples", 40, "--method", "mse", "--granularity", "row",
        "--kv-cache", "--check", text, "--out", out, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    model = load_language_model(finished_run)
    batches = text_windows(model, text, "train", count=40, length=32).split(1)
    expected = calibrate(model, batches, method="mse", granularity="row", kv_cache=True)
    found = load_calibration(out)
    assert found.health == expected.health
    assert found.seen.source == str(text)
    assert found.seen.split == "train"
    record = json.loads(result.stdout)
    assert record["layers"][0]["scale"] == float(expected.input_scales[expected.health[0].path])
    assert record["kv_cache"]["0"] == [float(scale) for scale in expected.kv_scales[0]]
    assert record["left_out"]["lm_head"] == "head: by its name"
    checked = coverage(model, expected, text_windows(model, text, "test", count=32, length=32).split(1))
    assert record["check"][0]["saturation_fraction"] == checked[0].saturation_fraction
    found.apply(model)
    with torch.no_grad():
        assert model.logits(batches[0]).isfinite().all()


def test_prints_a_table_without_warnings(octavo, finished_run, text, tmp_path):
    arguments = ["calibrate", finished_run, "--data", text, "--out", tmp_path / "out"]
    result = octavo(*arguments, "--samples", 64)
    assert result.exit_code == 0, result.output
    assert "model.layers.0.self_attn.q_proj +2" in result.stdout
    assert "warning" not in result.stdout
    assert ": scales of 7 layers; use it with octavo export" in " ".join(result.stdout.split())
    few = octavo(*arguments, "--samples", 8, "--method", "percentile", "--percentile", 90)
    assert "warning: 8 samples are few" in few.stdout
    assert "percentile clips up to" in few.stdout


def test_calibration_check_warns_about_text_beyond_the_scales(octavo, finished_run, tmp_path):
    """Calibrated on one word, the model meets others."""
    (tmp_path / "one.txt").write_text("of course " * 3000)
    (tmp_path / "other.txt").write_text("".join(f"{n} times {n % 7}, {n * n}.\n" for n in range(3000)))
    result = octavo(
        "calibrate", finished_run, "--data", tmp_path / "one.txt", "--samples", 32, "--check", tmp_path / "other.txt",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "warning: the checked text exceeds the scales of" in result.stdout


def test_an_input_that_is_warned_of_is_among_the_rows(octavo, finished_run, text, tmp_path, monkeypatch):
    """One row is shown, that of lowest SQNR, and another that a warning names."""
    monkeypatch.setattr("octavo.cli.calibrate.ROWS", 1)
    sentence = "the last quarter of the samples still moved the scale of 'model.layers.0.self_attn.v_proj' (20.0%)"
    for said, shown in ([], False), ([sentence], True):
        monkeypatch.setattr("octavo.quantization.Calibration.warnings", lambda _, said=said: said)
        result = octavo("calibrate", finished_run, "--data", text, "--samples", 32, "--out", tmp_path / "out")
        assert "the 1 of lowest SQNR among 4 inputs, and those named below" in " ".join(result.stdout.split())
        assert ("model.layers.0.self_attn.q_proj +2" in result.stdout) == shown  # it shares v_proj's input


def test_a_text_too_short_for_its_check_is_refused_at_once(octavo, finished_run, text, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.cli.calibrate.find_scales", lambda *_, **__: pytest.fail("calibrated"))
    (tmp_path / "short.txt").write_text("of course " * 40)
    result = octavo(
        "calibrate", finished_run, "--data", text, "--samples", 64, "--check", tmp_path / "short.txt",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "give more text" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_scales_of_keys_and_values_are_shown(octavo, finished_run, text, tmp_path):
    out = tmp_path / "out"
    result = octavo("calibrate", finished_run, "--data", text, "--samples", 64, "--kv-cache", "--out", out)
    assert result.exit_code == 0, result.output
    table = result.stdout[result.stdout.index("Keys and values") :]
    for scales in load_calibration(out).kv_scales.values():
        for scale in map(float, scales):
            assert f"{scale:.4g}" in table
            assert f"{scale * 448:.4g}" in table


def test_a_gguf_file_is_calibrated_too(octavo, text, tmp_path):
    path = small_gguf.write(tmp_path / "model.gguf")
    arguments = ["--data", text, "--samples", 4, "--context", 8, "--split", "all", "--out", tmp_path / "out"]
    result = octavo("calibrate", path, *arguments)
    assert result.exit_code == 0, result.output
    model = load_language_model(path)
    assert len(load_calibration(tmp_path / "out").apply(model).converted) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "median"], "method must be one of max, percentile, mse, entropy, not 'median'"),
        (["--granularity", "channel"], "weight_granularity must be one of tensor, row, 128x128"),
        (["--weights", "best"], "weight_method must be one of max, mse"),
        (["--method", "percentile", "--percentile", "0"], "percentile must be above 0"),
        (["--samples", "0"], "at least 1, not 0"),
        (["--context", "33"], "reads at most 32 tokens"),
        (["--split", "dev"], "split must be one of train, validation, test, all"),
        (["--skip", "nothing"], "pattern 'nothing' matches no layer"),
        (["--data", "nowhere.txt"], "there is no file or folder 'nowhere.txt'"),
        (["--from-run", "nowhere"], "there is no 'nowhere'"),
        (["--from-run", "nowhere", "--kv-cache"], "cannot be combined with --kv-cache; leave one of them out"),
        (["--from-run", "nowhere", "--method", "mse"], "cannot be combined with --method; leave one of them out"),
        (["--percentile", "99"], "--percentile 99.0 needs --method percentile"),
        (["--device", "tpu"], "device must be one of auto, cpu, cuda"),
        (["--seed", str(2**63)], "Invalid value for '--seed'"),
        (["--data", ""], "the source is empty"),
    ],
)
def test_bad_input_ends_in_one_sentence_and_writes_nothing(octavo, finished_run, tmp_path, options, words):
    text = tmp_path / "own.txt"
    text.write_text("of course, it is.\n" * 3000)
    data = [] if "--from-run" in options else ["--data", text]
    result = octavo("calibrate", finished_run, *data, "--out", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--data", "x"), ("--samples", 4), ("--split", "all"), ("--context", 8), ("--seed", 1), ("--skip", "*.o_proj")],
)
def test_from_run_refuses_text_options(octavo, tmp_path, option, value):
    result = octavo("calibrate", "m", "--from-run", "m", option, value, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert f"cannot be combined with {option}; leave one of them out" in result.stderr


def test_another_models_text_is_not_what_it_is_evaluated_on(octavo, tmp_path, monkeypatch):
    """A run's is its own; of a file's it is nothing of the language topics, most of which are built in for training."""
    (sources := tmp_path / "sources.txt").write_text("some words that are read before\n" * 300)
    monkeypatch.setattr(runs, "LIBRARY_SOURCES", str(sources))
    path = small_gguf.write(tmp_path / "model.gguf")
    result = octavo("calibrate", path, "--samples", 4, "--context", 8, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert load_calibration(tmp_path / "out").seen.source == str(sources)


def test_a_runs_text_is_its_own(octavo, finished_run, text, tmp_path):
    result = octavo("calibrate", finished_run, "--samples", 4, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert load_calibration(tmp_path / "out").seen.source == str(text)


def test_unwritable_folder_is_refused_before_anything_is_read(octavo, tmp_path, monkeypatch):
    (tmp_path / "shut").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "shut")
    result = octavo("calibrate", "no such model", "--out", tmp_path / "shut" / "out")
    assert result.exit_code == 2
    assert "you may not write into" in result.stderr


def test_folder_with_other_files_is_refused_before_anything_is_read(octavo, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    result = octavo("calibrate", "no such model", "--out", tmp_path)
    assert result.exit_code == 2
    assert "holds other files" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("option", "value"), [("--method", "best"), ("--granularity", "rows"), ("--weights", "kl"), ("--percentile", 0)]
)
def test_a_choice_that_does_not_exist_is_refused_before_anything_is_read(octavo, tmp_path, option, value):
    result = octavo("calibrate", "no such model", "--out", tmp_path / "out", option, value)
    assert result.exit_code == 2
    assert str(value) in result.stderr
    assert "no such model" not in result.stderr


@pytest.mark.parametrize("split", ["test", "all"])
def test_text_that_was_calibrated_on_is_no_check(octavo, finished_run, text, tmp_path, split):
    same = f"{text.parent}/./{text.name}"
    arguments = ["--data", text, "--split", split, "--check", same, "--out", tmp_path / "out"]
    result = octavo("calibrate", finished_run, *arguments)
    assert result.exit_code == 2
    assert f"100% of {same}, test is in {text}, {split}; check other text" in " ".join(result.stderr.split())


@pytest.mark.long
def test_a_text_that_the_calibrated_one_holds_is_no_check(octavo, finished_run, tmp_path):
    arguments = ["--data", "builtin", "--check", "language-topics", "--out", tmp_path / "out"]
    result = octavo("calibrate", finished_run, *arguments)
    assert result.exit_code == 2
    assert "95% of language-topics, all is in builtin, train" in " ".join(result.stderr.split())


def test_from_a_run_that_kept_no_amaxes(octavo, finished_run, tmp_path):
    result = octavo("calibrate", finished_run, "--from-run", finished_run, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "(tensorwise) has kept no amaxes" in result.stderr


@pytest.mark.long
def test_from_a_delayed_run(octavo, setting, text, tmp_path):
    assert octavo("train", *setting, "--recipe", "delayed", "--out", tmp_path / "run").exit_code == 0
    arguments = ["calibrate", tmp_path / "run", "--from-run", tmp_path / "run", "--out", tmp_path / "out"]
    result = octavo(*arguments, "--check", text, "--context", 16)
    assert result.exit_code == 0, result.output
    assert ": scales of 7 layers; use it with octavo export" in " ".join(result.stdout.split())
    assert "checked text" in result.stdout
    assert len(load_calibration(tmp_path / "out").input_scales) == 7
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{n} plus {n % 11} is {n + n % 11}, it seems!\n" for n in range(2000)))
    assert octavo("train", *setting, "--data", other, "--recipe", "bf16", "--out", tmp_path / "model").exit_code == 0
    arguments = ["calibrate", tmp_path / "model", "--from-run", tmp_path / "run", "--out", tmp_path / "more"]
    result = octavo(*arguments, "--check", text, "--split", "all")
    assert "takes amaxes from the run and cannot be combined with --split" in result.stderr
    result = octavo(*arguments, "--check", text, "--context", 16)
    assert (result.exit_code, "is of other weights of the same shape" in result.stderr) == (2, True)
    assert not (tmp_path / "more").exists()
    copy = tmp_path / "copy.txt"
    copy.write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    result = octavo(*arguments, "--check", copy, "--context", 16)
    assert (result.exit_code, "needs text that the scales were not calibrated on" in result.stderr) == (2, True)


def hugging_face(run, place):
    """The run's weights and tokenizer as a folder of Hugging Face's."""
    loaded, folder = load_language_model(run), place / f"hf-{run.name}"
    folder.mkdir()
    write_llama(folder, loaded.model)  # type: ignore[arg-type]
    write_tokenizer(folder, loaded.tokenizer, context=loaded.context)
    return folder


@pytest.mark.long
def test_no_command_takes_the_scales_of_another_run(octavo, setting, finished_run, text, tmp_path):
    scales, other = tmp_path / "scales", tmp_path / "other"
    arguments = ["--data", text, "--samples", 2, "--context", 16, "--kv-cache", "--out", scales]
    assert octavo("calibrate", finished_run, *arguments).exit_code == 0
    assert octavo("train", *setting, "--seed", 7, "--out", other).exit_code == 0
    for command in (
        ["export", other, "--calibration", scales, "--no-verify", "--out", tmp_path / "served"],
        ["export", hugging_face(other, tmp_path), "--calibration", scales, "--out", tmp_path / "served"],
        ["eval", other, "--data", text, "--calibration", scales, "--compare", "bf16,fp8-static"],
        ["serve", other, "--recipe", "fp8-static", "--calibration", scales, "--port", 0],
    ):
        result = octavo(*command)
        assert result.exit_code == 2, (command[0], result.output)
        assert "this calibration is of other weights of the same shape" in " ".join(result.stderr.split()), command[0]
    assert not (tmp_path / "served").exists()
    own = ["export", hugging_face(finished_run, tmp_path), "--calibration", scales, "--no-verify"]
    result = octavo(*own, "--out", tmp_path / "served")
    assert result.exit_code == 0, result.output  # the weights of the run, in another format
