"""A whole study on a tiny model: what it measures against the pieces, what it skips, what it resumes."""

import json
import math
import os
import shutil
import signal

import pytest
import torch

from octavo.doctor import diagnose
from octavo.errors import ConfigError, DataError
from octavo.experiments.run_measures import Phase
from octavo.experiments.study import run_study
from octavo.reports.study import study_page
from octavo.text.corpus import Split
from octavo.text.tokens import prepare
from octavo.training import loop, study_table
from octavo.training.comparison import Gap, Study
from octavo.training.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import load_run
from octavo.training.setup import build_model
from octavo.training.watched_run import watched_run

RECIPES = ("fp32", "bf16", "tensorwise")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    text = folder / "own.txt"
    text.write_text("".join(f"{n} times {n % 7} makes {n * (n % 7)}, of course.\n" for n in range(4000)))
    return prepare(text, folder / "tokens", vocab_size=300)


@pytest.fixture(scope="module")
def config():
    return RunConfig(
        model=ModelConfig(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1),
        data=DataConfig(vocab_size=300),
        training=TrainingConfig(
            steps=6, batch_size=4, context=32, warmup=2, eval_interval=2, eval_tokens=512, checkpoint_interval=2
        ),
    )


@pytest.fixture(scope="module")
def finished(data, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "runs"
    return folder, run_study(config, folder, data=data)


@pytest.mark.long
def test_runs_start_equal_and_see_the_same_windows(finished):
    _, study = finished
    assert [run.recipe for run in study.runs] == list(RECIPES)
    first_losses = [run.train_curve[0][1] for run in study.runs]
    assert max(first_losses) - min(first_losses) < 0.01
    assert len({len(run.window_nats) for run in study.runs}) == 1


@pytest.mark.long
def test_final_loss_is_that_of_the_last_checkpoint_on_the_test_text(finished, data, config):
    folder, study = finished
    for recipe in RECIPES:
        run = load_run(folder / recipe)
        inputs, targets = data.windows(32, split=Split.TEST)
        with torch.no_grad(), run.surroundings:
            logits = torch.cat([run.model(rows) for rows in inputs.split(16)])
        nats = -logits.float().log_softmax(-1).gather(-1, targets[..., None]).double().mean().item()
        assert study.run(recipe).nats == pytest.approx(nats, rel=1e-5)


def test_precisions_differ_but_little(finished):
    _, study = finished
    gap = study.gap("tensorwise", "fp32")
    assert 0 < abs(gap.nats) < 0.05
    assert 0 < study.run("bf16").gradient_error < study.run("tensorwise").gradient_error < 0.3
    assert study.run("fp32").gradient_error == 0
    assert study.relative_variance("tensorwise") == pytest.approx(1, abs=0.2)


def test_gradient_variance_is_that_of_the_batches_to_come_at_the_final_weights(finished, data, config):
    folder, study = finished
    run, training = load_run(folder / "fp32"), config.training
    gradients = []
    for step in range(training.steps, training.steps + 16):
        inputs, targets = data.batch(step, batch_size=4, context=32, seed=training.seed)
        loss = torch.nn.functional.cross_entropy(run.model(inputs).flatten(0, 1), targets.flatten())
        parts = torch.autograd.grad(loss, list(run.model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]).double())
    spread = torch.stack(gradients).var(dim=0, correction=1).sum().item()
    assert study.run("fp32").gradient_variance == pytest.approx(spread, rel=1e-6)


def test_unigram_line_is_the_validation_splits(finished, data):
    _, study = finished
    tokens = torch.from_numpy(data.splits[Split.VALIDATION].astype("int64"))
    shares = torch.bincount(tokens).double() / len(tokens)
    assert study.unigram_nats == pytest.approx(-torch.special.xlogy(shares, shares).sum().item(), rel=1e-9)


def test_a_second_call_trains_nothing_and_says_the_same(finished, data, config):
    folder, study = finished
    phases: list[Phase] = []
    assert run_study(config, folder, data=data, on_phase=phases.append) == study
    assert phases == []


@pytest.mark.long
def test_finished_runs_are_skipped_when_only_the_end_is_missing(finished, data, config):
    folder, study = finished
    (folder / "study.json").unlink()
    phases: list[Phase] = []
    again = run_study(config, folder, data=data, on_phase=phases.append)
    assert not [phase for phase in phases if phase.name.startswith("train")]
    assert again.runs == study.runs


def test_another_configuration_in_the_folder_is_refused(finished, data, config):
    folder, _ = finished
    with pytest.raises(ConfigError, match=r"training\.steps = 6, not 8"):
        run_study(config.with_training(steps=8), folder, data=data)
    assert json.loads((folder / "study.json").read_text())["runs"][0]["steps"] == 6


@pytest.mark.long
def test_an_interrupted_study_goes_on_where_it_stopped(finished, data, config, tmp_path):
    """A signal in the second run: the first stays, the second resumes, every loss is that of a run without pause."""

    def interrupt(phase):
        if phase.name == "train bf16" and phase.done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_study(config, tmp_path, data=data, on_phase=interrupt)
    steps = []
    study = run_study(config, tmp_path, data=data, on_phase=lambda phase: steps.append((phase.name, phase.done)))
    assert min(done for name, done in steps if name == "train bf16") == 4
    assert not [name for name, _ in steps if name == "train fp32"]
    uninterrupted = finished[1]
    for recipe in RECIPES:
        assert study.run(recipe).train_curve == uninterrupted.run(recipe).train_curve
        assert study.run(recipe).window_nats == uninterrupted.run(recipe).window_nats


@pytest.mark.parametrize("recipes", [(), ("fp32", "fp32")])
def test_recipes_are_needed_once_each(data, config, tmp_path, recipes):
    with pytest.raises(ConfigError, match="each once"):
        run_study(config, tmp_path, data=data, recipes=recipes)


def test_an_unknown_recipe_stops_before_anything_is_written(data, config, tmp_path):
    with pytest.raises(ConfigError, match="fp7"):
        run_study(config, tmp_path / "new", data=data, recipes=("fp32", "fp7"))
    assert not (tmp_path / "new").exists()


def test_a_context_longer_than_the_test_text_stops_before_training(data, config, tmp_path):
    with pytest.raises(DataError, match="context"):
        run_study(config.with_training(context=1 << 15), tmp_path / "new", data=data)
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_study_runs_a_delayed_recipe(data, config, tmp_path):
    study = run_study(config.with_training(steps=2), tmp_path, data=data, recipes=("fp32", "delayed"))
    assert math.isfinite(study.gap("delayed", "fp32").nats)
    assert 0 < (study.run("delayed").gradient_error or 0) < 0.5


@pytest.mark.long
@pytest.mark.parametrize("change", [{"prompt": "7 times"}, {"test_tokens": 64}])
def test_a_finished_study_answers_what_is_asked_now(finished, data, config, tmp_path, change):
    shutil.copytree(finished[0], tmp_path / "copy")
    again = run_study(config, tmp_path / "copy", data=data, **change)
    assert again.prompt == change.get("prompt", finished[1].prompt)
    assert len(again.run("fp32").window_nats) == change.get("test_tokens", 10**9) // 32 or "prompt" in change


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.long
def test_a_run_resumed_with_other_threads_records_both(data, config, tmp_path, torch_threads):
    def interrupt(phase):
        if phase.name == "train bf16" and phase.done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    torch_threads(1)
    with pytest.raises(KeyboardInterrupt):
        run_study(config, tmp_path, data=data, recipes=("fp32", "bf16"), on_phase=interrupt)
    torch_threads(2)
    study = run_study(config, tmp_path, data=data, recipes=("fp32", "bf16"))
    assert [run.threads for run in study.runs] == [(1,), (1, 2)]
    (tmp_path / "study.json").unlink()
    assert [run.threads for run in run_study(config, tmp_path, data=data, recipes=("fp32", "bf16")).runs] == [
        (1,),
        (1, 2),
    ]


def test_every_phase_has_the_threads_that_were_asked_for(data, config, tmp_path, torch_threads):
    torch_threads(2)
    seen = {}

    def look(phase):
        seen[phase.name] = torch.get_num_threads()

    run_study(config.with_training(threads=1), tmp_path, data=data, recipes=("fp32",), on_phase=look)
    assert seen == dict.fromkeys(("train fp32", "evaluate fp32", "gradient noise", "generate"), 1)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["study.json", "fp32/measures.json"])
def test_a_changed_number_is_not_reported(finished, data, config, tmp_path, name):
    folder = shutil.copytree(finished[0], tmp_path / "study")
    if name != "study.json":
        (folder / "study.json").unlink()
    file = folder / name
    text = file.read_text()
    place = text.index('"window_nats"')
    digit = next(index for index in range(place, len(text)) if text[index].isdigit())
    file.write_text(text[:digit] + str(int(text[digit]) - 1) + text[digit + 1 :])
    with pytest.raises(DataError, match=rf"{file}' .*a value in it was changed.*delete it and run the study again"):
        run_study(config, folder, data=data)


@pytest.mark.long
@pytest.mark.parametrize("name", ["study.json", "fp32/measures.json"])
def test_a_file_without_a_sum_is_an_older_one_and_read(finished, data, config, tmp_path, name):
    folder = shutil.copytree(finished[0], tmp_path / "study")
    fields = json.loads((folder / name).read_text())
    del fields["sha256"]
    (folder / name).write_text(json.dumps(fields))
    if name != "study.json":
        (folder / "study.json").unlink()
    assert run_study(config, folder, data=data).runs == finished[1].runs


@pytest.fixture
def hopeless(monkeypatch):
    """Models whose losses lie far beyond the 709 nats at which their exponential leaves float64."""

    def build(config, vocab_size):
        model, converted = build_model(config, vocab_size)
        with torch.no_grad():
            model.lm_head.weight.mul_(1e5)
        return model, converted

    monkeypatch.setattr(loop, "build_model", build)


@pytest.mark.long
def test_a_loss_whose_perplexity_overflows_is_trained_measured_and_shown(data, config, tmp_path, hopeless):
    """JSON has no infinity: metrics.jsonl, study.json, the table, both pages and the doctor take it for what it is."""
    config = config.with_training(lr=1e-9, min_lr=0.0, statistics_interval=1)
    study = run_study(config, tmp_path / "runs", data=data)
    assert min(run.nats for run in study.runs) > 710
    assert Study.from_json((tmp_path / "runs/study.json").read_text()) == study
    lines = read_metrics(tmp_path / "runs/tensorwise")
    found = [line["perplexity"] for line in lines if line["kind"] == "evaluation"]
    assert found == [None] * 4
    table = {row.name: row for row in study_table.rows(study, "cpu")}
    assert table["Final perplexity"].cells == ("inf", "inf", "inf")
    assert "Steps to perplexity inf" in table
    assert study_table.verdict(study)
    assert study_table.target_note(study).startswith("Target perplexity inf")
    assert ">inf<" in study_page(study)
    run = watched_run(tmp_path / "runs/tensorwise")
    assert run.series.curve("nats")[1].min() > 710
    diagnose(run.series)


def test_a_gap_whose_percents_overflow_is_infinite():
    assert Gap(nats=1000.0, standard_error=1.0).percent == math.inf
    assert Gap(nats=-1000.0, standard_error=1.0).percent == -100.0
