"""``octavo agree`` on a finished run: tables, a verdict as exit code, a page, a record; or one sentence."""

import json
import re
import statistics

import pytest
import torch

from octavo.engines import agree, agree_with_itself, get, model_as
from octavo.engines.token_scores import text_log_probabilities
from octavo.language_model import load_language_model
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from tests.unit.cli.conftest import run_octavo

pytestmark = pytest.mark.long
SIDES = ["--trainer", "te-block", "--server", "vllm-block"]
SHOWN = {
    "|Δ log p| of the text, mean": "abs_delta",
    "|Δ log p|, 99th percentile": "p99",
    "logits' difference, RMS": "logit_rms",
}


@pytest.fixture(scope="module")
def small(finished_run, text):
    return ["agree", finished_run, "--data", text, "--split", "test", "--windows", 2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, small):
    out = tmp_path_factory.mktemp("agree") / "out"
    result = run_octavo(*small, *SIDES, "--why", "--max-kl", 1e-9, "--out", out)
    assert result.exit_code == 1, result.output
    return out, result


def test_tables_and_the_verdict(saved):
    _, result = saved
    assert "KL(server ‖ trainer)" in result.stdout
    assert "model.layers.0.mlp.down_proj" in result.stdout
    assert "input.power_of_two" in result.stdout
    assert "No number on this text depends on" in result.stdout
    assert "te-block, read, not run: " in result.stdout
    assert "the bar of 1e-09 is missed." in result.stdout


def test_the_floor_stands_beside_the_number(saved):
    out, result = saved
    record = json.loads((out / "agreement.json").read_text())
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    for words, name in SHOWN.items():
        numbers = [record[side][name] for side in ("tokens", "floor")]
        numbers = [each["estimate"] if isinstance(each, dict) else each for each in numbers]
        assert numbers[0] != pytest.approx(numbers[1], rel=0.1)
        _, *shown = next(cells for cells in rows if cells[0] == words)
        assert [float(cell.split()[0]) for cell in shown] == pytest.approx(numbers, rel=0.01), name


def test_the_record_is_what_the_function_returns(saved, finished_run, text):
    out, _ = saved
    record = json.loads((out / "agreement.json").read_text())
    model = load_language_model(finished_run)
    tokens = evaluation_windows(model, str(text), "test", count=2, length=model.context)
    assert [json.loads(line) for line in (out / "tokens.jsonl").read_text().splitlines()] == tokens.tolist()
    expected = agree(model, "te-block", "vllm-block", tokens)
    assert record["tokens"]["reverse_kl"]["estimate"] == expected.kl.estimate
    assert record["tokens"]["reverse_kl"]["high"] == expected.kl.high
    assert [layer["path"] for layer in record["layers"]] == [layer.path for layer in expected.layers]
    for side, windows in (("tokens", expected.scores), ("floor", expected.floor)):
        deltas = [abs(each) for scores in windows for each in scores.delta.tolist()]
        assert record[side]["p99"] == pytest.approx(statistics.quantiles(deltas, n=100, method="inclusive")[98])
        assert record[side]["max"] == max(deltas)
    ratio = torch.cat([scores.log_ratio for scores in expected.scores]).exp()
    share = float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    assert record["tokens"]["effective_share"] == pytest.approx(share)
    assert record["attribution"]["properties"][0]["name"].endswith("power_of_two")
    assert not record["agrees"]


def test_the_page(saved):
    out, _ = saved
    page = (out / "agree.html").read_text()
    for words in ("How many tokens differ", "Interactions", "model.layers.0.mlp.down_proj", "input.power_of_two"):
        assert words in page
    assert "{{" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_an_engine_meets_any_bar_of_its_own(small):
    result = run_octavo(*small, "--trainer", "vllm-token", "--server", "vllm-token", "--max-kl", 0, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["agrees"]
    assert record["tokens"]["max"] == 0
    assert record["floor"]["max"] > 0


def test_other_sums_are_said(small):
    result = run_octavo(*small, *SIDES, "--accumulate", "fp32")
    assert result.exit_code == 0, result.output
    assert "Sums are fp32, not the engines' own." in result.stdout


def test_a_real_server_is_explained(small, tmp_path, finished_run, text):
    model = load_language_model(finished_run)
    window = evaluation_windows(model, str(text), "test", count=2, length=model.context)[0]
    logits = model_as(model.model, get("vllm-block-ue8m0"))(window[None, :-1])[0]
    faulty = tmp_path / "server.jsonl"
    faulty.write_text(json.dumps([None, *text_log_probabilities(logits, window[1:]).tolist()]) + "\n")
    claimed = ["--trainer", "te-block", "--server", "vllm-block-ue8m0"]
    result = run_octavo(*small, *claimed, "--server-logprobs", faulty)
    assert result.exit_code == 0, result.output
    assert re.search(r"best first:\n\s+as claimed.*: exact", result.stdout)
    assert "does not exclude" not in result.stdout
    noise = torch.rand(len(window) - 1, generator=torch.Generator().manual_seed(0))
    noisy = (text_log_probabilities(logits, window[1:]) - noise).tolist()  # far above what any change does
    faulty.write_text(json.dumps([None, *noisy]) + "\n")
    result = run_octavo(*small, *claimed, "--server-logprobs", faulty)
    said = " ".join(result.stdout.split())
    assert "The server may be as claimed. The text does not exclude" in said  # one window excludes nothing
    assert "Floor: last bits alone change te-block by a mean |Δ log p| of" in said


def test_a_server_against_itself(small, finished_run, text):
    result = run_octavo(*small, "--server", "vllm-token", "--itself")
    assert result.exit_code == 0, result.output
    for words in (
        "in company",
        "token by token",
        "4 ranks, rounded products",
        "2 ranks differ most by",
        "read, not run",
    ):
        assert words in result.stdout
    record = json.loads(run_octavo(*small, "--server", "vllm-token", "--itself", "--json").stdout)
    model = load_language_model(finished_run)
    tokens = evaluation_windows(model, str(text), "test", count=2, length=model.context)
    found = agree_with_itself(model, "vllm-token", tokens)
    assert [(way["name"], way["equal"]) for way in record["ways"]] == [(way.name, way.is_equal) for way in found.ways]
    assert [way["tokens"]["reverse_kl"]["estimate"] for way in record["ways"]] == [
        way.kl.estimate for way in found.ways
    ]
    assert record["causes"] == {str(ranks): way.name for ranks, way in found.causes.items()}
    assert not record["agrees"]


def test_the_bar_is_for_every_way(small):
    assert run_octavo(*small, "--server", "vllm-token", "--itself", "--max-kl", 0).exit_code == 1
    assert run_octavo(*small, "--server", "vllm-token", "--itself", "--max-kl", 10).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--server", "vllm-block"], "give --trainer to compare two engines, or --itself"),
        ([*SIDES, "--itself"], "--itself compares one engine; leave --trainer out"),
        (["--server", "vllm-block", "--itself", "--why"], "leave --why out"),
        (["--server", "vllm-block", "--itself", "--out", "somewhere"], "leave --out out"),
        (["--server", "vllm", "--itself"], "there is no engine 'vllm'"),
        (["--trainer", "te", "--server", "vllm-block"], "there is no engine 'te'"),
        ([*SIDES, "--max-kl", "-1"], "--max-kl takes nats a token"),
        ([*SIDES, "--accumulate", "hopper-slow"], "--accumulate takes fp32"),
        ([*SIDES, "--server-logprobs", "nowhere.jsonl"], "cannot use nowhere.jsonl"),
    ],
)
def test_mistakes_are_one_sentence(small, arguments, words):
    result = run_octavo(*small, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
