"""What ``octavo doctor bisect`` prints, and what it refuses. That it finds the right layers: tests/unit/trials."""

import json

import pytest

from octavo.experiments import Bisection, Part
from octavo.experiments.paired import Effect

GAP = Effect(nats=0.08, error=0.001, orders=(0.079, 0.081))
FOUND = Bisection(
    gap=GAP,
    floor=0.003,
    parts=(
        Part(layers=("model.layers.0.mlp.down_proj",), effect=Effect(nats=0.06, error=0.001, orders=()), share=0.75),
        Part(layers=("a", "b"), effect=Effect(nats=0.02, error=0.001, orders=()), share=0.25),
    ),
    layers=7,
    first_step=4,
    steps=40,
    runs=12,
)


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr("octavo.cli.doctor.bisect.find_layers", lambda *_, **__: FOUND)


@pytest.mark.usefixtures("found")
def test_layers_and_shares_are_printed_and_how_to_keep_them(octavo, finished_run):
    result = octavo("doctor", "bisect", finished_run)
    printed = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert "model.layers.0.mlp.down_proj 75% 0.06 0.001" in printed
    assert "all 7 layers 100% 0.08" in printed
    assert 'overrides = { "model.layers.0.mlp.down_proj" = "bf16", "a" = "bf16", "b" = "bf16" }' in printed
    assert "12 runs of 40 steps from step 4, with 2 batch orders" in printed


@pytest.mark.usefixtures("found")
def test_json_holds_the_same(octavo, finished_run):
    record = json.loads(octavo("doctor", "bisect", finished_run, "--json").stdout)
    assert record["is_measurable"] is True
    assert record["gap"]["nats"] == 0.08
    assert [part["share"] for part in record["parts"]] == [0.75, 0.25]


def test_bisect_runs_to_the_end_on_a_gap_that_cannot_be_measured(octavo, finished_run):
    result = octavo("doctor", "bisect", finished_run, "--steps", "2")
    assert result.exit_code == 0
    assert "8 runs of 2 steps from step 4" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"), [(["nowhere"], "holds no run"), (["RUN", "--steps", "1"], "steps must be a whole number")]
)
def test_bad_input_is_one_sentence_and_exit_code_2(octavo, finished_run, arguments, words):
    given = [finished_run if word == "RUN" else word for word in arguments]
    result = octavo("doctor", "bisect", *given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
