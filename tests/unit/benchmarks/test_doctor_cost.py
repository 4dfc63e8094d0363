"""The bar of the doctor's cost, judged on made-up times."""

import sys

import pytest

from benchmarks import doctor_cost
from benchmarks.measure import Ratio
from octavo.doctor.capture_scheduler import DIAGNOSED_EVERY
from octavo.training.config import demo_config
from octavo.training.metrics import MetricsLog


@pytest.mark.parametrize(("looked_at", "judging", "cost", "verdict"), [
    (1.4, 0.4, "4.5 %", "met"), (1.5, 0.0, "5.0 %", "met"), (1.5, 0.8, "6.0 %", "missed"), (2, 0, "10.0 %", "missed"),
])  # fmt: skip
def test_a_tenth_of_a_look_and_an_eightieth_of_judging(looked_at, judging, cost, verdict):
    assert DIAGNOSED_EVERY == 8
    seconds = {"plain": [2.0] * 3, "looked at": [2.0 * looked_at] * 3, "judging": [2.0 * judging] * 3}
    recipe, *_, found, judged = doctor_cost.row_of("rowwise", seconds)
    assert (recipe, found, judged) == ("rowwise", cost, verdict)


def test_a_look_writes_and_a_plain_step_does_not(tmp_path):
    log = MetricsLog(tmp_path, after_step=None)
    steps = doctor_cost.contestants(demo_config(quick=True), "tensorwise", log)
    written = []
    for name in ("plain", "looked at", "judging"):
        steps[name]()
        written.append((tmp_path / "metrics.jsonl").stat().st_size)
    log.close()
    assert written[0] == 0 < written[1] == written[2]


def test_the_result_names_the_command_that_gives_it(monkeypatch, written):
    monkeypatch.setattr(sys, "argv", ["doctor_cost", "--rounds", "7", "--recipes", "rowwise", "mxfp8"])
    monkeypatch.setattr(doctor_cost, "contestants", lambda *_: {})
    monkeypatch.setattr(doctor_cost, "interleaved", lambda *_, **__: {})
    monkeypatch.setattr(doctor_cost, "ratio", lambda *_: Ratio(1.2, 1.1, 1.3))
    doctor_cost.main()
    lines = written()
    assert lines[2].startswith("`python -m benchmarks.doctor_cost --rounds 7 --recipes rowwise mxfp8`, ")
    assert "Median of 7 interleaved rounds" in lines[-1]
    assert [line.split(" | ")[0] for line in lines[8:10]] == ["| rowwise", "| mxfp8"]
