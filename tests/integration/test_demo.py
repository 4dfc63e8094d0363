"""The demo from end to end on the built-in corpus, with a model so small that it takes seconds.

``octavo demo --quick`` with its real sizes is run by the continuous integration after these tests.
"""

import json
import re
import time

import pytest
from typer.testing import CliRunner

import octavo.cli.demo as command
from octavo.cli.app import app
from octavo.training.config import DataConfig, ModelConfig, RunConfig, TrainingConfig, demo_config, load_config

pytestmark = pytest.mark.long

TINY = RunConfig(
    model=ModelConfig(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1),
    data=DataConfig(source="builtin", vocab_size=300),
    training=TrainingConfig(steps=8, batch_size=2, context=64, warmup=2, eval_interval=2, eval_tokens=1024),
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "demo_config", lambda quick: TINY)
        yield folder, lambda *more: CliRunner().invoke(app, ["demo", "--quick", "--out", str(folder), *more])


@pytest.fixture(scope="module")
def first(demo):
    _, run = demo
    result = run()
    assert result.exit_code == 0, result.output
    return result


def test_every_phase_shows_progress(first):
    for phase in ("read", "tokenizer", "encode", "train fp32", "train bf16", "train tensorwise"):
        assert f"{phase} ..." in first.stderr
    for phase in ("evaluate fp32", "evaluate tensorwise", "gradient noise", "generate"):
        assert f"{phase} ..." in first.stderr


def test_the_articles_table_is_printed(first):
    for row in ("Final perplexity", "Steps to perplexity", "Gradient variance", "Tokens/s", "Peak memory"):
        assert row in first.stdout
    for figure in ("9.42/9.51/9.58", "+0.74 %", "+2.4 %", "1.08×", "1.42×"):
        assert figure in first.stdout
    assert re.search(r"[+-]\d+\.\d\d %", first.stdout)
    assert re.search(r"[+-]0\.\d{4} ± ", first.stdout)


def test_demo_notes_that_fp8_is_emulated_and_shows_generated_text(first):
    words = " ".join(first.stdout.split())
    assert "On a CPU, FP8 is emulated" in words
    assert "do not predict those on Hopper" in words
    assert "The FP8 tensorwise model continues" in words
    assert "  | " in first.stdout


def test_quick_demo_states_that_it_is_no_evidence(first):
    assert "8 steps with one seed show that everything works but prove nothing" in " ".join(first.stdout.split())


def test_the_folder_holds_what_the_last_lines_say(demo, first):
    folder, _ = demo
    config = load_config(folder / "config.toml")
    assert config == TINY.with_training(threads=config.training.threads)
    assert config.training.threads >= 1
    assert "octavo study" in (folder / "report.html").read_text()
    for recipe in ("fp32", "bf16", "tensorwise"):
        lines = [json.loads(line) for line in (folder / recipe / "metrics.jsonl").read_text().splitlines()]
        assert [line["kind"] for line in lines].count("step") == 8
        assert [line["kind"] for line in lines].count("evaluation") == 5
        assert any(line["kind"] == "statistics" for line in lines) == (recipe == "tensorwise")
        assert list((folder / recipe).glob("checkpoints/*/model.safetensors"))
        assert list((folder / recipe).glob("tensorboard/events*"))


def test_a_second_run_skips_everything_and_prints_the_same(demo, first):
    folder, run = demo
    before = (folder / "study.json").stat().st_mtime_ns
    again = run()
    assert again.exit_code == 0
    assert again.stdout == first.stdout
    assert "train" not in again.stderr
    assert "tokenizer" not in again.stderr
    assert (folder / "study.json").stat().st_mtime_ns == before


def test_json_alone_on_stdout(demo, first):
    _, run = demo
    record = json.loads(run("--json").stdout)
    assert [entry["recipe"] for entry in record["runs"]] == ["fp32", "bf16", "tensorwise"]


def test_force_starts_over(demo, first):
    folder, run = demo
    before = (folder / "fp32" / "metrics.jsonl").stat().st_mtime_ns
    time.sleep(0.01)
    assert run("--force").exit_code == 0
    assert (folder / "fp32" / "metrics.jsonl").stat().st_mtime_ns > before


@pytest.mark.parametrize("quick", [False, True])
def test_the_real_settings_train_fp8_on_the_built_in_corpus(quick):
    config = demo_config(quick=quick)
    assert config.data.source == "builtin"
    assert config.training.recipe == "tensorwise"
    assert not config.training.adjust_for_fp8


def test_the_quick_demo_with_its_short_warmup_has_the_lower_learning_rate():
    quick, full = demo_config(quick=True).training, demo_config().training
    assert quick.warmup < full.warmup
    assert quick.lr <= 1e-3 < full.lr
