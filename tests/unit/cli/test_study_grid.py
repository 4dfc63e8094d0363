"""``octavo study`` of several seeds and of presets: tables, files, and options that do not go together."""

import json

import pytest

from octavo.cli import thread_choice
from tests.unit.cli.conftest import run_octavo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grid") / "runs"


@pytest.fixture(scope="module")
def arguments(folder, setting):
    return ["study", *setting, "--out", folder, "--recipes", "bf16,tensorwise", "--seeds", "2", "--jobs", "2"]


@pytest.fixture(scope="module")
def printed(arguments):
    result = run_octavo(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.long
def test_files_are_written_and_a_second_call_runs_nothing(octavo, printed, arguments, folder):
    assert {"config.toml", "bars.toml", "results.jsonl", "report.html", "cells"} <= {p.name for p in folder.iterdir()}
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(line["variant"], line["seed"]) for line in lines] == [
        ("bf16", 0), ("tensorwise", 0), ("bf16", 1), ("tensorwise", 1)
    ]  # fmt: skip
    again = octavo(*arguments)
    assert again.stdout == printed.stdout
    assert "evaluate" not in again.stderr


@pytest.mark.long
def test_json_has_every_group_with_its_verdict(octavo, printed, arguments):
    record = json.loads(octavo(*arguments, "--json").stdout)
    assert [group["group"] for group in record["groups"]] == [["bf16", 1.0, 1.0], ["tensorwise", 1.0, 1.0]]
    assert record["groups"][0]["verdict"] == "baseline"
    assert record["pairs"] == [], "runs of two steps end above the unigram entropy"


@pytest.mark.long
def test_other_bars_are_refused_once_there_are_results(octavo, printed, arguments, tmp_path):
    (tmp_path / "bars.toml").write_text("gap_nats = 0.1\n")
    result = octavo(*arguments, "--bars", tmp_path / "bars.toml")
    assert result.exit_code == 2
    assert "bars do not change once there are results" in " ".join(result.stderr.split())


@pytest.mark.long
def test_bars_that_were_edited_after_the_runs_are_refused(octavo, printed, arguments, folder):
    path = folder / "bars.toml"
    before = path.read_text()
    edited = before.replace("gap_nats = 0.005", "gap_nats = 5.0")
    try:
        for text in (edited, edited.partition("\n")[2]):  # with its seal, and without
            path.write_text(text)
            result = octavo(*arguments)
            assert result.exit_code == 2
            assert "is not as octavo wrote it before the runs" in " ".join(result.stderr.split())
        path.unlink()
        result = octavo(*arguments)
        assert result.exit_code == 2
        assert "is missing beside the study's runs" in " ".join(result.stderr.split())
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    ("holds", "options", "seeds"),
    [
        ("cells/one", ["--seeds", "1"], "several seeds"),
        ("cells/one", ["--seeds", "1", "--force"], "several seeds"),
        ("study.json", ["--seeds", "2"], "one seed"),
    ],
)
def test_one_seed_and_several_do_not_share_a_folder(setting, tmp_path, holds, options, seeds):
    (tmp_path / holds).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    result = run_octavo("study", *setting, "--out", tmp_path, *options)
    assert result.exit_code == 2
    assert f"holds a study of {seeds}" in " ".join(result.stderr.split())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seeds", "2", "--lr-factors", "1,1.0000001"], "must differ in their first six digits"),
        (["--jobs", "2"], "--jobs needs a study of several seeds"),
        (["--seeds", "2", "--prompt", "a"], "--prompt needs a study of one seed"),
        (["--seeds", "2", "--force"], "--force needs a study of one seed"),
        (["--preset", "phases", "--recipes", "bf16"], "--recipes needs a study of no preset"),
        (["--preset", "nothing"], "there is no preset 'nothing'"),
        (["--lr-factors", "1,x"], "--lr-factors takes numbers separated by commas"),
        (["--seeds", "0"], "greater than or equal to 1"),
        (["--seeds", "2", "--recipes", "bf16,rowwize"], "did you mean 'rowwise'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(octavo, setting, tmp_path, options, sentence):
    result = octavo("study", *setting, "--out", tmp_path / "new", *options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "a launch of several ranks needs a study of several seeds"),
        (["--seeds", "2", "--jobs", "2"], "--jobs needs a study of one process"),
    ],
)
def test_ranks_are_refused_where_they_cannot_share_runs(setting, tmp_path, monkeypatch, options, sentence):
    launch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    result = run_octavo("study", *setting, "--out", tmp_path / "new", *options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_a_process_that_joins_takes_the_folders_number_of_threads(octavo, text, tiny, tmp_path, monkeypatch):
    config = tmp_path / "run.toml"
    config.write_text(tiny.read_text().replace("threads = 1\n", ""))
    arguments = ["study", "--config", config, "--data", text, "--out", tmp_path / "runs", "--recipes", "bf16"]
    monkeypatch.setattr(thread_choice, "choose_threads", lambda: 2)
    assert octavo(*arguments, "--seeds", "1", "--lr-factors", "1,2").exit_code == 0
    monkeypatch.setattr(thread_choice, "choose_threads", lambda: 1)
    assert octavo(*arguments, "--seeds", "2", "--lr-factors", "1,2").exit_code == 0
    assert "threads = 2" in (tmp_path / "runs" / "config.toml").read_text()
