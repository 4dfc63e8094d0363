"""Runs that begin at another run's checkpoint: the same run if the configuration is the same, or a changed one."""

import dataclasses
import json

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.training.branching import begin_from
from octavo.training.checkpoint import latest, read_state
from octavo.training.checkpoint_files import MODEL, OPTIMIZER, SCALING, stored_tensors
from octavo.training.loop import train
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import CONFIG
from octavo.training.setup import build_model
from tests.unit.training.tiny_runs import comparable, tiny_config, tiny_data


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of six steps with a checkpoint every two, its text, and its folder."""
    data = tiny_data(tmp_path_factory.mktemp("text"))
    config = tiny_config(recipe="delayed", statistics_interval=2, checkpoint_interval=2, keep_checkpoints=0)
    folder = tmp_path_factory.mktemp("runs") / "mine"
    train(config, folder, data=data)
    return config, data, folder


def checkpoint_of(folder, step):
    return folder / "checkpoints" / f"step-{step:06d}"


def tensors(checkpoint, kind):
    return dict(stored_tensors(checkpoint, kind, json.loads((checkpoint / "state.json").read_text())["files"]))


def test_with_the_same_configuration_it_is_the_same_run_bit_for_bit(trained, tmp_path):
    config, data, folder = trained
    train(config, tmp_path / "again", data=data, start=checkpoint_of(folder, 4))
    assert comparable(read_metrics(tmp_path / "again")) == comparable(read_metrics(folder))
    ours, theirs = (tensors(checkpoint_of(run, 6), MODEL) for run in (tmp_path / "again", folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1e-4, "min_lr": 1e-5},
        {"recipe": "tensorwise"},
        {"recipe": "bf16"},
        {"overrides": {"*.down_proj": "tensorwise"}},
        {"recipe_options": {"history_length": 4}},
        {"precision": "fp16"},
        {"steps": 8, "batch_size": 4},
    ],
)
def test_a_changed_configuration_begins_with_the_checkpoints_weights_and_lines(trained, tmp_path, changes):
    config, data, folder = trained
    config, start, run = config.with_training(**changes), checkpoint_of(folder, 2), tmp_path / "changed"
    result = train(config, run, data=data, start=start)
    assert result.step == config.training.steps
    lines, before = (
        comparable(read_metrics(run)),
        [line for line in comparable(read_metrics(folder)) if line["step"] <= 2],
    )
    assert lines[: len(before)] == before
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, config.training.steps + 1))
    first = checkpoint_of(run, 2)
    for kind in (MODEL, OPTIMIZER):
        ours, theirs = tensors(first, kind), tensors(start, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_state(first).config_hash == config.config_hash() != read_state(start).config_hash


def test_histories_are_kept_where_scales_are_still_delayed(trained, tmp_path):
    config, data, folder = trained
    start = checkpoint_of(folder, 2)
    train(config.with_training(overrides={"*.down_proj": "tensorwise"}), tmp_path, data=data, start=start)
    ours, theirs = tensors(checkpoint_of(tmp_path, 2), SCALING), tensors(start, SCALING)
    assert {name for name in theirs if "down_proj" not in name} == ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_is_resumed_like_any_run(trained, tmp_path):
    """Killed after its first checkpoint, it goes on from there and not from its first weights."""
    config, data, folder = trained
    config = config.with_training(recipe="tensorwise")
    whole = train(config, tmp_path / "whole", data=data, start=checkpoint_of(folder, 2))
    for later in (4, 6):
        for file in (kept := checkpoint_of(tmp_path / "whole", later)).iterdir():
            file.unlink()
        kept.rmdir()
    assert latest(tmp_path / "whole") == checkpoint_of(tmp_path / "whole", 2)
    assert train(config, tmp_path / "whole", data=data, resume=True).train_curve == whole.train_curve


def test_a_run_that_is_killed_while_it_begins_has_no_configuration(trained, tmp_path, monkeypatch):
    config, data, folder = trained

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.training.branching.save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", data=data, start=checkpoint_of(folder, 2))
    assert not (tmp_path / "run" / CONFIG).exists()


def test_a_checkpoint_without_its_runs_metrics_begins_without_lines(trained, tmp_path):
    config, data, folder = trained
    alone = tmp_path / "kept" / "mine" / "step-000002"
    alone.mkdir(parents=True)
    for file in checkpoint_of(folder, 2).iterdir():
        (alone / file.name).write_bytes(file.read_bytes())
    train(config, tmp_path / "run", data=data, start=alone)
    assert [line["step"] for line in read_metrics(tmp_path / "run") if line["kind"] == "step"] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("step-000099", {}, r"is no checkpoint \(no state.json\); name a folder such as runs/mine/checkpoints/step"),
        ("..", {}, r"is no checkpoint \(no state.json\); name a folder such as .*/step-00000\d$"),
        ("step-000004", {"steps": 4}, "has finished step 4, and the new run ends after 4"),
        ("step-000004", {"model": {"hidden_size": 32}}, "it belongs to another model"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_run(trained, tmp_path, name, changes, words):
    config, data, folder = trained
    if "model" in changes:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes["model"]))
    else:
        config = config.with_training(**changes)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        train(config, tmp_path / "run", data=data, start=folder / "checkpoints" / name)
    assert not (tmp_path / "run").exists()


def test_another_text_is_refused(trained, tmp_path):
    config, _, folder = trained
    other = tiny_data(tmp_path, text="".join(f"{n} is a number, and {n + 1} is the next.\n" for n in range(800)))
    model, _ = build_model(config, other.vocab_size)
    with pytest.raises(CheckpointError, match="was trained on other text"):
        begin_from(checkpoint_of(folder, 2), config, tmp_path / "run", model=model, data=other)
