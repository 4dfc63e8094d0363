"""A checkpoint that can be continued from, and every way in which one cannot."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from octavo.experiments import Origin
from octavo.experiments.preflight.checkpoint import checkpoint_check
from octavo.training.checkpoint import latest
from octavo.training.config import save_config
from octavo.training.loop import train
from tests.unit.training.tiny_runs import tiny_data


@pytest.fixture(scope="module")
def trained(tmp_path_factory, origin):
    return train(origin.config.with_training(steps=2), tmp_path_factory.mktemp("runs") / "run", data=origin.data)


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained.run_dir, tmp_path / "run")


@pytest.fixture
def own(origin):
    return Origin(config=origin.config.with_training(steps=2), data=origin.data)


def refused(own, run) -> str:
    check, after = checkpoint_check(own, run)
    (finding,) = check.findings
    assert (finding.code, finding.severity) == ("checkpoint", "fail")
    assert after.start is None
    return finding.cause


def test_a_whole_one_is_where_the_setting_starts(own, run):
    check, after = checkpoint_check(own, run)
    assert check.findings == ()
    assert check.said.startswith("step 2 loads")
    assert after.first_step == 2


def test_new_run_has_no_checkpoint_to_check(own):
    assert checkpoint_check(own, None)[0].said == "a new run: nothing to continue"


def test_run_without_a_first_checkpoint_is_reported(own, run):
    shutil.rmtree(run / "checkpoints")
    check, _ = checkpoint_check(own, run)
    assert check.said.startswith("none yet")


def test_a_damaged_file_is_named(own, run):
    file = latest(run) / "optimizer.safetensors"  # type: ignore[operator]
    file.write_bytes(file.read_bytes()[:-1])
    assert "optimizer.safetensors" in refused(own, run)


def test_another_configuration_is_refused(own, run):
    changed = Origin(config=own.config.with_training(lr=1e-3), data=own.data)
    save_config(changed.config, run / "config.toml")
    assert "another configuration" in refused(changed, run)


def test_other_text_is_refused(own, run, tmp_path):
    other = tiny_data(tmp_path, "Another text, and not the one before. " * 500)
    assert "trained on other text" in refused(Origin(config=own.config, data=other), run)


def test_scaling_state_that_is_not_complete_is_refused(own, run, monkeypatch):
    folder = latest(run)
    assert folder is not None
    state = load_file(folder / "scaling.safetensors")
    del state["model.layers.0.mlp.up_proj.input.amax"]
    save_file(state, folder / "scaling.safetensors")
    monkeypatch.setattr("octavo.training.checkpoint_files.fingerprint", lambda file: recorded(folder, file))
    assert "1 entry ('model.layers.0.mlp.up_proj.input.amax') is missing" in refused(own, run)


def recorded(folder, file):
    """What state.json says of the file: as if it had been saved that way."""
    import json

    return json.loads((folder / "state.json").read_text())["files"][file.name]
