"""What a run in which the doctor finds something leaves in its folder."""

import dataclasses
import shutil

import pytest

from octavo.doctor import Captures
from octavo.training.loop import train
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import CAPTURES, remove_runs
from tests.unit.doctor.one_layer import finding, found
from tests.unit.training.tiny_runs import comparable, tiny_config

PATH = "model.layers.0.mlp.down_proj"


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_run_captures_layers_with_findings_and_computes_the_same(tmp_path, data, recipe):
    config = tiny_config(recipe=recipe, statistics_interval=2, grad_accumulation=2)
    with finding(found(path=PATH)):
        train(config, tmp_path / "found", data=data)
    train(config, tmp_path / "not", data=data)
    captures = Captures(tmp_path / "found" / CAPTURES)
    (capture,) = captures.of(PATH)
    assert (capture.step, capture.recipe.name, capture.weight.shape) == (2, recipe, (16, 32))
    assert len(captures.files()) == 1
    assert not (tmp_path / "not" / "doctor").exists()
    lines, others = (comparable(read_metrics(tmp_path / name)) for name in ("found", "not"))
    assert lines == others


def test_resumed_run_captures_the_same_layers_as_an_uninterrupted_one(tmp_path, data):
    """Captures from before the checkpoint are not repeated; those from after it are discarded."""
    config = tiny_config(recipe="tensorwise", statistics_interval=1, checkpoint_interval=3, keep_checkpoints=9)
    with finding(found(path=PATH)):
        train(config, tmp_path / "whole", data=data)
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000006")
        captures = Captures(tmp_path / "cut" / CAPTURES)
        captures.add(dataclasses.replace(captures.of(PATH)[0], step=5))
        train(config, tmp_path / "cut", data=data, resume=True)
    files = [[file.name for file in Captures(tmp_path / name / CAPTURES).files()] for name in ("whole", "cut")]
    assert files[0] == files[1]
    assert len(files[0]) == 1


def test_removing_a_run_removes_its_captures(tmp_path, data):
    with finding(found(path=PATH)):
        train(tiny_config(recipe="tensorwise", statistics_interval=1), tmp_path / "run", data=data)
    assert (tmp_path / "run" / CAPTURES).is_dir()
    (tmp_path / "run" / "doctor" / "notes.txt").write_text("somebody's")
    remove_runs([tmp_path / "run"])
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["doctor", "notes.txt"]
