"""``python -m benchmarks.hopper``: the rehearsal, what it refuses, and what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.hopper import __main__ as command
from benchmarks.hopper import runner
from benchmarks.hopper.runner import Part
from octavo.bench.results import Section, Verdict
from tests.policy.source_tree import ROOT, SOURCE

FOUND = Section(
    title="T",
    columns=("timed",),
    rows=(("a",),),
    verdicts=(Verdict(claim="c", found=1.0, bar=0.5),),
)


def fine(_):
    yield FOUND


def interrupted(_):
    yield FOUND
    raise KeyboardInterrupt


@pytest.fixture
def on_gpu(monkeypatch, session):
    """A machine whose GPU is the rehearsal's CPU, and one part."""
    monkeypatch.setattr(runner, "PARTS", (Part("casts", fine, 1.0),))
    monkeypatch.setattr(command, "hopper_session", lambda: session)


@pytest.mark.long
def test_a_rehearsal_of_a_part_prints_its_tables_and_writes_nothing(hopper, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = hopper("--rehearse", "--only", "accumulation")
    assert result.exit_code == 0
    assert "the times mean nothing" in result.stdout
    assert result.stdout.strip().endswith(command.REHEARSED)
    assert "## accumulation" in result.stdout
    assert "## casts" not in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_building_ahead_times_nothing_and_writes_nothing(hopper, on_gpu, tmp_path, monkeypatch, session):
    monkeypatch.chdir(tmp_path)
    result = hopper("--prebuild", "0/2", "--only", "casts")
    assert result.exit_code == 0
    assert result.stdout == "built ahead: casts; 0 failed\n"
    assert [next(session.prebuilds) for _ in range(3)] == [True, False, True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rehearse", "--out", "x"], "a rehearsal writes no results; leave out --out"),
        (["--prebuild", "0/1", "--out", "x"], "building ahead writes no results; leave out --out"),
        (["--prebuild", "2/2"], "--prebuild takes I/N with I below N"),
        ([], "name a folder for the results with --out"),
        (["--out", "x"], "needs an H100 or H200, and torch sees no CUDA device"),
        (["--out", "x", "--only", "y"], "there is no part 'y'"),
        (["--out", "x", "--from", "nowhere.json"], "nowhere.json: no such file"),
    ],
)
def test_bad_input_is_one_sentence(hopper, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = hopper(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


BARE = """
import sys
sys.modules |= dict.fromkeys(["tokenizers", "plotly", "plotly.offline", "torchao", "transformers", "tomli_w",
                              "tensorboard", "pyarrow", "octavo.kernels._native"])
from runpy import run_module
sys.argv = ["hopper", "--rehearse", "--only", "gemms"]
run_module("benchmarks.hopper", run_name="__main__")
"""


@pytest.mark.long
def test_bench_runs_with_only_torch_typer_and_rich():
    """From the source tree, without native kernels, tokenizers or anything that draws."""
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", BARE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "## gemms" in done.stdout
    missing = done.stdout.partition("Not measured:\n\n")[2].partition("\n\n")[0].splitlines()
    assert all("not there: backend" in line and "it runs on CUDA" in line for line in missing), "only CUDA was missed"


@pytest.mark.usefixtures("on_gpu")
def test_a_folder_that_nothing_can_be_written_to_is_refused(hopper, tmp_path):
    (tmp_path / "x").write_text("")
    for folder, words in ((tmp_path / "x", "file exists"), ("/proc/x", "cannot use /proc/x")):
        result = hopper("--out", folder)
        assert result.exit_code == 2
        assert words in result.stderr


@pytest.mark.usefixtures("on_gpu")
def test_three_files_are_written_and_named(hopper, tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    result = hopper("--out", tmp_path / "new" / "folder")
    assert result.exit_code == 0
    files = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert [Path(name).suffix for name in files] == [".html", ".json", ".md", ".js"]
    assert [name.startswith("hopper_cpu-a-rehearsal_20") for name in files] == [True, True, True, False]
    assert "1 of 1 bars met, 0 not measured" in result.stdout


@pytest.mark.usefixtures("on_gpu")
def test_a_result_is_never_overwritten_and_two_are_joined(hopper, tmp_path):
    for folder in ("one", "two"):
        assert hopper("--out", tmp_path / folder, "--only", "casts").exit_code == 0
    again = hopper("--out", tmp_path / "one")
    assert again.exit_code == 2
    assert "holds today's result; name another folder, and join the two with --from" in again.stderr
    (one,), (two,) = ((tmp_path / folder).glob("*.json") for folder in ("one", "two"))
    assert hopper("--from", one, "--from", two, "--out", tmp_path / "both").exit_code == 0
    (text,) = (tmp_path / "both").glob("*.md")
    assert text.read_text().count("## casts") == 1


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def measured(hopper, on_gpu, tmp_path):
    """Two results of the same machine and day."""

    def measure(name):
        assert hopper("--out", tmp_path / name, "--only", "casts").exit_code == 0
        (path,) = (tmp_path / name).glob("*.json")
        return path

    return measure("one"), measure("two")


def refused(hopper, *arguments):
    """The sentence."""
    result = hopper(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.strip().splitlines()
    return line


def test_joining_replaces_none_of_what_is_joined(hopper, measured):
    one, two = measured
    before = contents(one.parent)
    line = refused(hopper, "--from", one, "--from", two, "--out", one.parent)
    assert f"{one} is one of the files to join, and would be replaced; name another folder with --out" in line
    assert contents(one.parent) == before


def test_a_result_that_is_not_among_the_joined_is_kept(hopper, measured):
    one, two = measured
    before = contents(two.parent)
    line = refused(hopper, "--from", one, "--out", two.parent)
    assert f"{two} holds a part that none of the given files has; name another folder with --out" in line
    assert contents(two.parent) == before


def test_an_odd_file_in_the_way_is_kept(hopper, measured, tmp_path):
    one, two = measured
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / one.name).write_text("{}")
    assert f"{folder / one.name} is no result" in refused(hopper, "--from", one, "--from", two, "--out", folder)
    assert contents(folder) == {one.name: b"{}"}


def test_a_join_is_made_again_with_more_and_a_result_drawn_where_it_lies(hopper, measured, tmp_path):
    one, two = measured
    for given in (["--from", one], ["--from", one, "--from", two]):
        assert hopper(*given, "--out", tmp_path / "both").exit_code == 0
    before = one.read_text()
    assert hopper("--from", one, "--out", one.parent).exit_code == 0
    assert one.read_text() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"facts": None}, "is no result of octavo bench: facts must be a table, not None"),
        ({"facts": {"torch": "2"}}, "is no result of octavo bench: facts have no 'device'"),
        (
            {"theme": "serving"},
            "is a result of 'serving', and --from takes those of benchmarks.hopper; leave it out",
        ),
        ({"parts": [{"name": "casts", "seconds": "3"}]}, "parts[0].seconds must be a number, not '3'"),
    ],
)
def test_an_odd_file_is_one_sentence_and_nothing_is_written(hopper, measured, tmp_path, change, words):
    one, two = measured
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps(json.loads(two.read_text()) | change))
    line = refused(hopper, "--from", one, "--from", odd, "--out", tmp_path / "new")
    assert str(odd) in line
    assert words in line
    assert not (tmp_path / "new").exists()


def test_a_bar_that_is_not_judged_is_counted(hopper, on_gpu, tmp_path, monkeypatch):
    owing = Part("casts", fine, 1.0, lambda _: [Verdict(claim="c", bar=0.5), Verdict(claim="d", bar=1.0)])
    monkeypatch.setattr(runner, "PARTS", (owing,))
    result = hopper("--out", tmp_path)
    assert "1 of 2 bars met, 1 not judged, 0 not measured" in result.stdout
    (text,) = tmp_path.glob("*.md")
    assert "- not judged: d (at least 1.00): no section of its part came to it" in text.read_text()


@pytest.mark.usefixtures("on_gpu")
def test_without_plotly_the_other_two_are_written_and_can_be_drawn_later(hopper, tmp_path, monkeypatch):
    pytest.importorskip("plotly", reason="plotly is not installed")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "plotly.offline", None)
        result = hopper("--out", tmp_path)
    assert result.exit_code == 0
    assert "plotly, which is not installed" in " ".join(result.stderr.split())
    written = {path.suffix: path for path in tmp_path.iterdir()}
    assert sorted(written) == [".json", ".md"]
    before = written[".md"].read_text()
    redrawn = hopper("--from", written[".json"], "--out", tmp_path / "drawn")
    assert redrawn.exit_code == 0
    drawn = {path.suffix: path for path in (tmp_path / "drawn").iterdir()}
    assert sorted(drawn) == [".html", ".js", ".json", ".md"]
    assert drawn[".md"].read_text() == before
    assert drawn[".json"].read_text() == written[".json"].read_text()


def test_ctrl_c_keeps_what_is_finished(hopper, tmp_path, monkeypatch, session):
    monkeypatch.setattr(
        runner, "PARTS", (Part("card", fine, 0.4), Part("casts", interrupted, 0.3), Part("gemms", fine, 0.3))
    )
    monkeypatch.setattr(command, "hopper_session", lambda: session)
    result = hopper("--out", tmp_path)
    assert result.exit_code == 130
    (path,) = tmp_path.glob("*.json")
    parts = json.loads(path.read_text())["parts"]
    assert [len(part["sections"]) for part in parts] == [1, 1, 0]
    assert parts[2]["failure"]["reason"] == "left out, interrupted"


def test_report_is_written_before_the_next_part_starts(hopper, tmp_path, monkeypatch, session):
    seen = []

    def looking(_):
        seen.extend(sorted(path.suffix for path in tmp_path.iterdir()))
        yield FOUND

    monkeypatch.setattr(runner, "PARTS", (Part("card", fine, 0.5), Part("casts", looking, 0.5)))
    monkeypatch.setattr(command, "hopper_session", lambda: session)
    assert hopper("--out", tmp_path).exit_code == 0
    assert seen == [".json", ".md"]


def test_help_names_every_option():
    shown = CliRunner().invoke(command.app, ["--help"])
    assert shown.exit_code == 0, shown.output
    assert {"--out", "--rehearse", "--seconds", "--only", "--prebuild", "--from"} <= set(shown.stdout.split())
