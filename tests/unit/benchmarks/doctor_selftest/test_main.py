"""Output and exit code of ``python -m benchmarks.doctor_selftest``; the result itself: test_selftest.py."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from benchmarks.doctor_selftest.__main__ import app
from benchmarks.doctor_selftest.cases import CLEAN, RunKind, SelftestCase
from benchmarks.doctor_selftest.other_tools import ANOMALY, HUGGING_FACE, ToolAnswer
from benchmarks.doctor_selftest.selftest import JudgedRun, SelftestConfig, SelftestResult

PLAIN = next(iter(CLEAN))


def run_of(kind, name):
    said = {ANOMALY: ToolAnswer(""), HUGGING_FACE: ToolAnswer("")}
    case = SelftestCase(kind=kind, name=name, seed=0)
    return JudgedRun(case=case, findings=(), nats=5.0, failure=None, answers=said, seconds=1.0)


@pytest.fixture
def selftest():
    """The command in this process."""

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="selftest")

    return run


@pytest.fixture
def asked(monkeypatch):
    """The configurations that were run; every fault of them is missed."""
    given = []

    def run(config, *, data, processes, on_progress):
        on_progress("run", 1, 1)
        given.append((config, data, processes))
        one = dataclasses.replace(config, faults=config.faults[:1], clean=(PLAIN,), seeds=(0,), cures=0)
        return SelftestResult(
            config=one, runs=tuple(run_of(case.kind, case.name) for case in one.cases()), seconds=60.0
        )

    monkeypatch.setattr("benchmarks.doctor_selftest.__main__.run_selftest", run)
    monkeypatch.setattr(
        "benchmarks.doctor_selftest.__main__.prepare", lambda _source, _folder, *, vocab_size, **_: vocab_size
    )
    return given


def test_a_missed_fault_ends_with_1_and_tables(selftest, asked):
    result = selftest("--quick", "--processes", "2")
    assert result.exit_code == 1
    assert "Recall 0.000" in result.stdout
    assert "First finding by fault" in result.stdout
    ((config, data, processes),) = asked
    assert len(config.seeds) == 1
    assert data == config.setting.vocab_size
    assert processes == 2


def test_default_selftest_is_the_published_one(selftest, asked):
    selftest()
    assert asked[0][0] == SelftestConfig()


@pytest.mark.usefixtures("asked")
def test_json_and_markdown_hold_the_result(selftest, tmp_path):
    file = tmp_path / "selftest.md"
    result = selftest("--json", "--out", file)
    record = json.loads(result.stdout)
    assert (record["passed"], record["runs"], record["recall"]) == (False, 2, 0.0)
    assert record["confusion"]["clean"] == {"nothing": 1}
    assert file.read_text().startswith("# The doctor's self-test")


def test_a_result_within_the_bars_ends_with_0(selftest, monkeypatch):
    monkeypatch.setattr(SelftestResult, "passed", property(lambda _: True))
    result = SelftestResult(config=SelftestConfig(), runs=(run_of(RunKind.CLEAN, PLAIN),), seconds=1.0)
    monkeypatch.setattr("benchmarks.doctor_selftest.__main__._run", lambda *_: result)
    assert selftest("--quick").exit_code == 0


def test_a_file_that_could_not_be_written_is_refused_before_anything_runs(selftest, asked, tmp_path):
    result = selftest("--out", tmp_path / "no" / "file.md")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no folder" in result.stderr
    assert asked == []


def test_help_names_every_option(selftest):
    shown = selftest("--help")
    assert shown.exit_code == 0, shown.output
    assert {"--quick", "--tuning", "--processes", "--out", "--json"} <= set(shown.stdout.replace(",", " ").split())
