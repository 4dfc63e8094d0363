"""Where trials of a run begin: its checkpoint, its own tokens, and clear words where they are missing."""

import shutil

import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.experiments import origin_of, short_run
from octavo.training.loop import train
from tests.unit.training.tiny_runs import tiny_config, tiny_data


@pytest.fixture
def run(tmp_path):
    data = tiny_data(tmp_path / "study")
    return train(tiny_config(recipe="delayed", steps=4), tmp_path / "study" / "delayed", data=data).run_dir


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    (tmp_path / "study").mkdir()


def test_run_is_continued_from_its_newest_checkpoint_without_changing_it(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    origin = origin_of(run)
    assert origin.start is not None
    assert origin.first_step == 4
    found, trainer = short_run(origin.config, origin.data, steps=2, start=origin.start)
    assert [step for step, _ in found.losses] == [5, 6]
    assert not torch.equal(trainer.model.lm_head.weight, origin.start.weights["lm_head.weight"])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_run_without_a_checkpoint_begins_at_its_first_weights(run):
    shutil.rmtree(run / "checkpoints")
    origin = origin_of(run)
    assert (origin.start, origin.first_step) == (None, 0)


def test_tokens_are_found_in_the_run_too(run):
    shutil.move(run.parent / "data", run / "data")
    assert origin_of(run).data.vocab_size == 300


def test_missing_tokens_are_refused(run):
    shutil.rmtree(run.parent / "data")
    with pytest.raises(DataError, match="are neither in its folder nor next to it"):
        origin_of(run)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        origin_of(tmp_path)
