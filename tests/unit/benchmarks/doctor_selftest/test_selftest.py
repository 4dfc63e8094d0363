"""How runs are judged: findings are made by hand, so that every number is known; one tiny self-test runs whole."""

from dataclasses import replace

import pytest

from benchmarks.doctor_selftest import tables as selftest_tables
from benchmarks.doctor_selftest.cases import CLEAN, RunKind, SelftestCase
from benchmarks.doctor_selftest.other_tools import ANOMALY, HUGGING_FACE, ToolAnswer
from benchmarks.doctor_selftest.selftest import (
    JudgedRun,
    SelftestConfig,
    SelftestResult,
    measuring,
    quick,
    reference_of,
    run_selftest,
    tuning,
)
from octavo.doctor import Finding, Severity
from octavo.doctor.findings import Remedy
from octavo.errors import ConfigError
from tests.unit.benchmarks.doctor_selftest.tiny_trainer import TINY, data_in

PLAIN = next(iter(CLEAN))


def finding(code: str, path: str = "", *, severity: Severity = Severity.FAIL, role: str = "input") -> Finding:
    return Finding(code=code, severity=severity, path=path, role=role)


def judged(kind: RunKind, name: str, *findings: Finding, seed: int = 2, nats: float | None = 5.0) -> JudgedRun:
    case = SelftestCase(kind=kind, name=name, seed=seed)
    said = {ANOMALY: ToolAnswer(""), HUGGING_FACE: ToolAnswer("")}
    return JudgedRun(case=case, findings=findings, nats=nats, failure=None, answers=said, seconds=1.0)


def result_of(*runs: JudgedRun) -> SelftestResult:
    config = SelftestConfig(faults=("wrong scale", "Inf upstream"), clean=(PLAIN,), seeds=(2,))
    return SelftestResult(config=config, runs=runs, seconds=60.0)


NAMED = judged(RunKind.FAULT, "wrong scale", finding("inexact-amax", "model.layers.2.mlp.up_proj"))
ELSEWHERE = judged(RunKind.FAULT, "wrong scale", finding("inexact-amax", "model.layers.1.mlp.up_proj"))
OTHER = judged(RunKind.FAULT, "wrong scale", finding("saturation", "model.layers.2.mlp.up_proj"))
SILENT = judged(RunKind.FAULT, "wrong scale")
QUIET = judged(RunKind.CLEAN, PLAIN)
NOTED = judged(RunKind.CLEAN, PLAIN, finding("slow-layer", severity=Severity.NOTE))
WARNED = judged(RunKind.CLEAN, PLAIN, finding("saturation", severity=Severity.WARN))
FAILED = judged(RunKind.CLEAN, PLAIN, finding("saturation"))


@pytest.mark.parametrize(
    ("runs", "recall", "precision", "fails"),
    [
        ([NAMED, QUIET], 1.0, 1.0, 0),
        ([NAMED, NOTED], 1.0, 1.0, 0),
        ([NAMED, WARNED], 1.0, 0.5, 0),
        ([NAMED, FAILED], 1.0, 0.5, 1),
        ([NAMED, ELSEWHERE], 0.5, 0.5, 0),
        ([NAMED, OTHER], 0.5, 0.5, 0),
        ([NAMED, SILENT], 0.5, 1.0, 0),
        ([SILENT, QUIET], 0.0, 0.0, 0),
    ],
)
def test_recall_precision_and_fails_on_clean_runs(runs, recall, precision, fails):
    result = result_of(*runs)
    assert (result.recall, result.precision, len(result.clean_fails)) == (recall, precision, fails)
    assert result.passed == (recall == precision == 1.0 and not fails)


def test_selftest_judges_the_first_finding_and_ignores_notes():
    right = finding("inexact-amax", "model.layers.2.mlp.up_proj")
    wrong, note = finding("saturation", "x"), finding("slow-layer", severity=Severity.NOTE)
    assert not judged(RunKind.FAULT, "wrong scale", wrong, right).names_fault(4)
    assert judged(RunKind.FAULT, "wrong scale", note, right).names_fault(4)
    assert not judged(RunKind.CLEAN, PLAIN, right).names_fault(4)


def test_the_matrix_counts_every_run_once():
    runs = [NAMED, ELSEWHERE, OTHER, SILENT, QUIET, FAILED]
    matrix = selftest_tables.confusion(result_of(*runs))
    assert matrix["wrong scale"] == {"inexact-amax": 1, "elsewhere": 1, "saturation": 1, "nothing": 1}
    assert matrix["clean"] == {"nothing": 1, "saturation": 1}
    assert matrix["Inf upstream"] == {}


def test_a_cure_is_the_gap_to_the_run_that_it_should_equal():
    case = SelftestCase(kind=RunKind.CURED, name="wrong scale", seed=2)
    clean = replace(QUIET, case=reference_of(case), nats=5.0)
    for nats, gap, restores in ((5.02, 0.02, True), (5.03, 0.03, False), (4.9, -0.1, True), (None, None, False)):
        cured = replace(QUIET, case=case, nats=nats, remedy=Remedy(text="blockwise"))
        result = result_of(clean, replace(NAMED, nats=6.0), cured)
        (cure,) = result.cures
        assert (cure.clean, cure.faulty) == (5.0, 6.0)
        assert cure.gap == (None if gap is None else pytest.approx(gap))
        assert cure.restores is restores or gap == 0.02  # 5.02 - 5.0 is a rounding above the bar
        assert cure.had_hurt


@pytest.mark.parametrize(("faulty", "had_hurt"), [(5.01, False), (4.9, False), (5.03, True), (None, True)])
def test_a_fault_that_did_no_harm_leaves_nothing_to_restore(faulty, had_hurt):
    case = SelftestCase(kind=RunKind.CURED, name="wrong scale", seed=2)
    cured = replace(QUIET, case=case, nats=5.0, remedy=Remedy(text="blockwise"))
    result = result_of(replace(QUIET, case=reference_of(case), nats=5.0), replace(NAMED, nats=faulty), cured)
    assert [cure.had_hurt for cure in result.cures] == [had_hurt]
    counted = f"1 of 1 remedies bring the loss to within 0.02 nats of the clean run; {int(had_hurt)} of these faults"
    assert counted in selftest_tables.markdown(result)


def test_findings_after_the_first_are_counted_too():
    follows, other = finding("saturation", "x"), finding("batch-norm", "y")
    run = judged(
        RunKind.FAULT, "wrong scale", *NAMED.findings, follows, other, finding("slow-layer", severity=Severity.NOTE)
    )
    assert run.unexplained == [other]
    assert "Of all 3 findings in runs with a fault 1 do not follow from it." in selftest_tables.summary(result_of(run))
    assert FAILED.unexplained == FAILED.said


def test_false_alarms_are_a_share_with_an_interval():
    result = result_of(NAMED, WARNED, *[QUIET] * 9)
    assert result.false_alarms == 0.1
    assert not result.passed, "one in ten is too many"
    assert result_of(*[NAMED] * 40, WARNED, *[QUIET] * 39).passed
    assert "1 one of severity warn or fail (Wilson's 95 %: at most 40% of all)." in selftest_tables.markdown(result)
    assert selftest_tables._at_most(0, 70) == pytest.approx(0.052, abs=5e-4)


def test_the_first_remedy_that_settings_can_carry_out():
    words, code = Remedy(text="look for it"), Remedy(text="mend it", changes={"no setting": 1})
    setting = Remedy(text="blockwise", changes={"overrides": {"a": "blockwise"}})
    found = finding("inexact-amax", "model.layers.2.mlp.up_proj")
    assert (
        judged(RunKind.FAULT, "wrong scale", replace(found, remedies=(words, code, setting))).first_remedy() is setting
    )
    assert judged(RunKind.FAULT, "wrong scale", replace(found, remedies=(words,))).first_remedy() is None
    assert SILENT.first_remedy() is None


def test_the_tables_say_what_the_result_holds():
    speaking = replace(
        NAMED, answers={ANOMALY: ToolAnswer("nan"), HUGGING_FACE: ToolAnswer("model.layers.2.mlp.up_proj Linear")}
    )
    result = result_of(speaking, SILENT, QUIET, WARNED)
    _, tools = selftest_tables.tables(result)
    assert tools.rows[0] == ("wrong scale", "2", "1, 1", "1, 0", "1, 1")
    text = selftest_tables.markdown(result)
    assert "Recall 0.500: the first finding names cause and place in 1 of 2 runs with a fault." in text
    assert "- wrong scale, seed 2: nothing was found" in text
    assert f"- clean run {PLAIN!r}, seed 2: warn: saturation at input" in text


def test_thresholds_are_tuned_on_other_seeds_and_another_width_than_they_are_measured_on():
    assert not set(measuring().seeds) & set(tuning().seeds)
    assert measuring().setting.hidden_size != tuning().setting.hidden_size
    assert (len(measuring().seeds), measuring().setting.hidden_size) == (5, 128)
    cases = list(measuring().cases())
    assert len(set(cases)) == len(cases)
    assert len(list(quick().cases())) < 40


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"faults": ("no fault",)}, "there is no fault 'no fault'; there are frozen scale"),
        ({"clean": ("no run",)}, "there is no clean run 'no run'"),
        ({"seeds": ()}, "needs at least one seed"),
    ],
)
def test_impossible_selftest_configurations_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        SelftestConfig(**options)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_whole_tiny_selftest(processes, tmp_path):
    setting = replace(TINY, steps=5)  # the fifth is looked at
    config = SelftestConfig(setting=setting, seeds=(1,), faults=("wrong scale",), clean=(PLAIN,))
    seen = []
    result = run_selftest(config, data=data_in(tmp_path), processes=processes, on_progress=lambda *x: seen.append(x))
    assert [run.case.kind for run in result.runs] == [RunKind.FAULT, RunKind.CLEAN, RunKind.CURED, RunKind.REFERENCE]
    assert all(run.nats is not None for run in result.runs)
    assert (seen[0], seen[-1]) == (("start", 0, 1), ("remedy", 2, 2))
    (cure,) = result.cures
    assert cure.remedy.changes == {"overrides": {"model.layers.1.mlp.up_proj": "blockwise"}}
    assert cure.remedy.text in selftest_tables.markdown(result)


def test_data_of_another_vocabulary_and_too_few_processes_are_refused(tmp_path):
    data = data_in(tmp_path)
    with pytest.raises(ConfigError, match="reads 2048 tokens and the data has 300"):
        run_selftest(quick(), data=data)
    with pytest.raises(ConfigError, match="processes must be at least 1"):
        run_selftest(quick(), data=data, processes=0)
