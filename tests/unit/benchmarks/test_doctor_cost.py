"""The bar of the doctor's cost, judged on made-up times."""

import sys

import pytest

from benchmarks import doctor_cost
from benchmarks.measure import Ratio
from octavo.doctor.capture_scheduler import DIAGNOSED_EVERY
from octavo.training.config import demo_config
from octavo.training.metrics import MetricsLog


@pytest.mark.parametrize(("sampled", "rules", "cost", "verdict"), [
    (1.4, 0.4, "4.5 %", "met"), (1.5, 0.0, "5.0 %", "met"), (1.5, 0.8, "6.0 %", "missed"), (2, 0, "10.0 %", "missed"),
])  # fmt: skip
def test_cost_is_a_tenth_of_a_sample_and_an_eightieth_of_the_rules(sampled, rules, cost, verdict):
    assert DIAGNOSED_EVERY == 8
    seconds = {"plain": [2.0] * 3, "sampled": [2.0 * sampled] * 3, "rules": [2.0 * rules] * 3}
    recipe, *_, found, judged = doctor_cost.row_of("rowwise", seconds)
    assert (recipe, found, judged) == ("rowwise", cost, verdict)


def test_only_a_sampled_step_writes_metrics(tmp_path):
    log = MetricsLog(tmp_path, after_step=None)
    steps = doctor_cost.contestants(demo_config(quick=True), "tensorwise", log)
    written = []
    for name in ("plain", "sampled", "rules"):
        steps[name]()
        written.append((tmp_path / "metrics.jsonl").stat().st_size)
    log.close()
    assert written[0] == 0 < written[1] == written[2]


def test_result_names_its_command(monkeypatch, written):
    monkeypatch.setattr(sys, "argv", ["doctor_cost", "--rounds", "7", "--recipes", "rowwise", "mxfp8"])
    monkeypatch.setattr(doctor_cost, "contestants", lambda *_: {})
    monkeypatch.setattr(doctor_cost, "interleaved", lambda *_, **__: {})
    monkeypatch.setattr(doctor_cost, "ratio", lambda *_: Ratio(1.2, 1.1, 1.3))
    doctor_cost.main()
    lines = written()
    assert lines[2].startswith("`python -m benchmarks.doctor_cost --rounds 7 --recipes rowwise mxfp8`, ")
    assert "Median of 7 interleaved rounds" in lines[-1]
    assert [line.split(" | ")[0] for line in lines[8:10]] == ["| rowwise", "| mxfp8"]
