"""``octavo study`` of several seeds and of presets: tables, files, and options that do not go together."""

import json

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grid") / "runs"


@pytest.fixture(scope="module")
def arguments(folder, setting):
    return ["study", *setting, "--out", folder, "--recipes", "bf16,tensorwise", "--seeds", "2", "--jobs", "2"]


@pytest.fixture(scope="module")
def printed(arguments):
    from tests.unit.cli.conftest import run_octavo

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


@pytest.mark.long
def test_other_bars_are_refused_once_there_are_results(octavo, printed, arguments, tmp_path):
    (tmp_path / "bars.toml").write_text("gap_nats = 0.1\n")
    result = octavo(*arguments, "--bars", tmp_path / "bars.toml")
    assert result.exit_code == 2
    assert "bars do not change once there are results" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
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
