"""The benchmark of docs/study.md, with a tiny configuration."""

import gzip
import json
import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import study
from octavo.experiments.presets import PRESETS
from octavo.training.config import load_config
from tests.unit.experiments.test_grid_comparison import compared, result

pytestmark = pytest.mark.long

TINY = """
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
num_kv_heads = 1

[data]
source = "{text}"
vocab_size = 300

[training]
threads = 1
steps = 40
lr = 0.01
batch_size = 2
context = 16
warmup = 1
eval_interval = 10
eval_tokens = 64
statistics_interval = 0
"""


@pytest.fixture
def tiny(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("study")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 1500)
    config = folder / "study.toml"
    config.write_text(TINY.format(text=text))
    monkeypatch.setattr(study, "CONFIG", config)
    monkeypatch.setattr(study, "RECIPES", ("bf16", "tensorwise"))
    monkeypatch.setattr(study, "PICTURE", folder / "study.svg")
    for name, seeds in (("SEEDS", 2), ("OF_FIRST_TWO", 3), ("OF_PRESETS", 2)):
        monkeypatch.setattr(study, name, seeds)
    return folder


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["study", "--jobs", "1", *map(str, arguments)])
    study.main()


def test_parts_share_their_runs(tiny, monkeypatch, written, capfd):
    known, out = tiny / "known.gz", tiny / "runs"
    call(monkeypatch, "--parts", "recipes,head", "--out", out, "--known", known)
    lines = written()
    assert "## recipes" in lines
    assert "## head" in lines
    assert any(line.startswith("Standard deviation of the baseline over its seeds: 0.") for line in lines)
    assert any(line.startswith(f"| {PRESETS['head'].claims[0].text} |") for line in lines)
    svg = (tiny / "study.svg").read_text()
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "tensorwise, 3 seeds" in svg
    trained = {path.parent.name for path in out.glob("head/cells/*/metrics.jsonl")}
    assert trained == {f"head-in-fp8-lr1-warmup1-seed{seed}" for seed in (0, 1)}
    before = [json.loads(line) for line in (out / "head/results.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in before] == ["bf16", "tensorwise", "head-in-fp8"] * 2

    call(monkeypatch, "--parts", "head", "--out", tiny / "elsewhere", "--known", known, "--no-write")
    assert not list((tiny / "elsewhere").glob("head/cells/*/metrics.jsonl"))  # none is trained again
    assert [json.loads(line) for line in (tiny / "elsewhere/head/results.jsonl").read_text().splitlines()] == before


def test_claims_are_tested_together_with_those_that_were_not_run():
    results = [
        result(name, seed, 4.0 + gap + 0.01 * seed + 0.001 * gap * seed**2)
        for name, gap in (("bf16", 0.0), ("tensorwise", 0.01), ("hopper", 0.02), ("stochastic", 0.01))
        for seed in range(4)
    ]
    alone = study.claims_of({"accumulation": compared(results)})["accumulation"][0]
    found = study.claims_of({"accumulation": compared(results), "stochastic-rounding": compared(results)})
    (one, other) = (found[part][0].p_value for part in ("accumulation", "stochastic-rounding"))
    every = sum(len(preset.claims) for preset in PRESETS.values())
    raw = compared(results).p_value(*PRESETS["accumulation"].claims[0].groups)
    assert one == alone.p_value == pytest.approx(every * raw)
    assert other is not None
    assert other > 0.05


def test_the_picture_has_larger_losses_to_the_right():
    results = [
        result(name, seed, 4.0 + gap + 0.01 * seed)
        for name, gap in (("bf16", 0.0), ("rowwise", 0.01), ("mxfp8", -0.01))
        for seed in range(3)
    ]
    circles = re.findall(r'<circle cx="([\d.]+)"', study.picture(compared(results)))
    right, left = map(float, circles)
    assert left < 370 < right


def test_runs_on_other_text_are_kept_and_not_given(tiny, tmp_path):
    grid, base = study.grids_of("recipes")[0], load_config(study.CONFIG)
    config = grid.cells[0].config(base).config_hash()
    known = tmp_path / "known.gz"
    lines = [json.dumps({"config": config, "data": text, "of": text}) for text in ("this", "another")]
    known.write_bytes(gzip.compress("\n".join(lines).encode()))
    runs = study.FinishedRuns(known, "this")
    assert str(runs).startswith("1 of 2 known runs are of this text")
    runs.give(grid, base, tmp_path)
    (given,) = tmp_path.glob("cells/*/measures.json")
    assert json.loads(given.read_text())["of"] == "this"
    given.unlink()
    runs.add(tmp_path)
    assert gzip.decompress(known.read_bytes()).decode().splitlines() == lines
    study.FinishedRuns(known, "a third").give(grid, base, tmp_path)
    assert not list(tmp_path.glob("cells/*/measures.json"))
