"""The benchmark's text and verdict; the model itself is not run here."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import qat
from octavo import recipes
from octavo.quantization import QATResult, QATSettings, TuneSettings
from octavo.quantization.qat.tuning import TuneStep
from octavo.text.corpus import Split
from octavo.text.sources import TOPICS, divide, load_documents
from tests.unit.quantization.tiny_model import tiny_language_model

SETTINGS = QATSettings(recipe=recipes.get("static"), baseline=True, tuning=TuneSettings(steps=3))


def result(above: float) -> QATResult:
    steps = tuple(TuneStep(step=i, loss=3.0, learning_rate=1e-5, grad_norm=1.0, seconds=float(i)) for i in (1, 2, 3))
    report: Any = None
    return QATResult(
        language_model=tiny_language_model(),
        report=report,
        settings=SETTINGS,
        windows={
            "bf16": (2.0, 3.0),
            "bf16-tuned": (1.9, 2.9),
            "fp8-of-tuned": (1.91, 2.93),
            "fp8-qat": (1.9 + above, 2.9 + above),
        },
        steps={"fp8-qat": steps},
    )


@pytest.mark.parametrize(("above", "verdict"), [(0.0049, "met, +0.49 %"), (0.0051, "missed, +0.51 %"), (-0.01, "met")])
def test_the_bar_is_half_a_percent_above_the_tuned_bf16_model(above, verdict):
    lines = qat.table(result(above))
    assert any(f"bar of 0.5 %: {verdict}" in line for line in lines)
    assert any(line.startswith("| bf16-tuned | 11.0232 | – | – |") for line in lines)
    assert "- fp8-qat: 2.0 s a step (median)" in lines


def test_qat_table_compares_training_with_casting_the_tuned_model():
    assert "- fp8-qat against fp8-of-tuned: -0.0200 ± 0.0100 nats" in qat.table(result(0.0))


def test_each_way_of_training_has_a_result_of_its_own():
    assert qat.variant(SETTINGS) == "static"
    distilled = replace(SETTINGS, by_data=True, tuning=TuneSettings(steps=3, distill=0.5))
    assert qat.variant(distilled) == "static_by_data_distilled"


@pytest.mark.long
def test_the_evaluation_text_is_not_trained_on(monkeypatch):
    seen: list[str] = []

    def windows(_model: object, source: str, split: Split, **_: object) -> None:
        seen.extend(document.text for document in divide(load_documents(source), by_file=True)[split])

    monkeypatch.setattr(qat, "text_windows", windows)
    qat.training_windows(tiny_language_model(), TuneSettings())
    topics = {document.text for document in load_documents(TOPICS)}
    assert len(seen) > 300
    assert len(topics) > 50
    assert not topics & set(seen)
