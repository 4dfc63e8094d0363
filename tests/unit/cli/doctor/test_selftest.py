"""What ``octavo doctor selftest`` prints of a result, writes and ends with; the result itself: tests/unit/trials."""

import dataclasses
import json

import pytest

from octavo.trials.cases import CLEAN, Case, Kind
from octavo.trials.other_tools import ANOMALY, HUGGING_FACE, Answer
from octavo.trials.selftest import JudgedRun, SelftestConfig, SelftestResult

PLAIN = next(iter(CLEAN))


def run_of(kind, name):
    said = {ANOMALY: Answer(""), HUGGING_FACE: Answer("")}
    case = Case(kind=kind, name=name, seed=0)
    return JudgedRun(case=case, findings=(), nats=5.0, failure=None, answers=said, seconds=1.0)


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

    monkeypatch.setattr("octavo.cli.doctor.selftest.run_selftest", run)
    monkeypatch.setattr("octavo.cli.doctor.selftest.prepare", lambda _source, _folder, *, vocab_size, **_: vocab_size)
    return given


def test_a_missed_fault_ends_with_1_and_tables(octavo, asked):
    result = octavo("doctor", "selftest", "--quick", "--processes", "2")
    assert result.exit_code == 1
    assert "Recall 0.000" in result.stdout
    assert "First finding by fault" in result.stdout
    ((config, data, processes),) = asked
    assert len(config.seeds) == 1
    assert data == config.setting.vocab_size
    assert processes == 2


def test_without_quick_it_is_what_is_published(octavo, asked):
    octavo("doctor", "selftest")
    assert asked[0][0] == SelftestConfig()


@pytest.mark.usefixtures("asked")
def test_json_and_markdown_hold_the_result(octavo, tmp_path):
    file = tmp_path / "selftest.md"
    result = octavo("doctor", "selftest", "--json", "--out", file)
    record = json.loads(result.stdout)
    assert (record["passed"], record["runs"], record["recall"]) == (False, 2, 0.0)
    assert record["confusion"]["clean"] == {"nothing": 1}
    assert file.read_text().startswith("# The doctor's self-test")


def test_a_result_within_the_bars_ends_with_0(octavo, monkeypatch):
    monkeypatch.setattr(SelftestResult, "passed", property(lambda _: True))
    result = SelftestResult(config=SelftestConfig(), runs=(run_of(Kind.CLEAN, PLAIN),), seconds=1.0)
    monkeypatch.setattr("octavo.cli.doctor.selftest._run", lambda *_: result)
    assert octavo("doctor", "selftest", "--quick").exit_code == 0


def test_a_file_that_could_not_be_written_is_refused_before_anything_runs(octavo, asked, tmp_path):
    result = octavo("doctor", "selftest", "--out", tmp_path / "no" / "file.md")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no folder" in result.stderr
    assert asked == []
