"""What text a model may be calibrated and tuned on where nobody names one; which folders are studies and no runs."""

import shutil

import pytest

from octavo.cli.training_text import own_source, text_to_train_on
from octavo.errors import ConfigError
from octavo.text.corpus import Split, library_documents, split_of, topic_documents
from octavo.text.sources import LIBRARY_SOURCES


def test_run_uses_its_own_text(finished_run, text):
    assert own_source(finished_run) == text_to_train_on(str(finished_run)) == str(text)


def test_default_text_excludes_evaluation_text(tmp_path):
    (tmp_path / "tokenizer.json").touch()  # a Hugging Face folder has one, as a run has
    (tmp_path / "config.json").write_text("{}")
    for model in (tmp_path, "model.gguf"):
        assert own_source(model) is None
        assert text_to_train_on(model) == LIBRARY_SOURCES
    with pytest.raises(ConfigError, match="there is no 'org/name'"):  # in the hub's cache
        own_source("org/name")
    topics = {document.path for document in topic_documents()}
    assert topics.isdisjoint(document.path for document in library_documents())
    in_training = sum(split_of(path) is Split.TRAIN for path in topics)
    assert in_training > 0.8 * len(topics), "why builtin is no default"


COMMANDS = [
    "calibrate",
    "export",
    "serve",
    "generate",
    "eval",
    "qat",
    "sensitivity",
    "doctor",
    "doctor bisect",
    "import",
]
MORE = {
    "generate": ["--prompt", "a"],
    "export": ["--out", "new"],
    "calibrate": ["--out", "new"],
    "qat": ["--out", "new"],
    "sensitivity": ["--out", "new"],
}


@pytest.fixture
def study_folder(tmp_path, monkeypatch, tiny):
    """What a study's folder looks like from its first second on: a configuration, and runs inside."""
    monkeypatch.chdir(tmp_path)
    for folder in ("demo", "demo/bf16", "demo/fp32"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.toml").write_text(tiny.read_text())
    return tmp_path / "demo"


@pytest.mark.parametrize("command", COMMANDS)
def test_study_differs_from_unfinished_run(octavo, study_folder, command):
    result = octavo(*command.split(), study_folder.name, *MORE.get(command, []))
    assert result.exit_code == 2
    assert "'demo' holds a study of several runs; name one of demo/bf16, demo/fp32" in result.stderr
    assert not (study_folder.parent / "new").exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_no_run_is_trained_into_a_studys_folder(octavo, study_folder, resume):
    result = octavo("train", "--out", study_folder.name, *resume)
    assert result.exit_code == 2
    assert "'demo' holds a study of several runs; name one of demo/bf16, demo/fp32" in result.stderr
    assert sorted(path.name for path in study_folder.iterdir()) == ["bf16", "config.toml", "fp32"]


@pytest.fixture
def folder_of_runs(study_folder):
    """Runs side by side, in a folder that has no configuration itself."""
    (study_folder / "config.toml").unlink()
    return study_folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_runs_is_no_study(octavo, folder_of_runs, command):
    result = octavo(*command.split(), folder_of_runs.name, *MORE.get(command, []))
    assert result.exit_code == 2
    assert "'demo' is a folder of runs; name one of demo/bf16, demo/fp32" in result.stderr


def test_a_new_run_beside_runs_gets_a_folder_of_its_own(octavo, folder_of_runs):
    result = octavo("train", "--out", folder_of_runs.name)
    assert result.exit_code == 2
    assert "'demo' holds other runs (demo/bf16, demo/fp32); give this one a folder of its own" in result.stderr
    result = octavo("train", "--out", folder_of_runs.name, "--resume")
    assert result.exit_code == 2
    assert "'demo' is a folder of runs; name one of demo/bf16, demo/fp32" in result.stderr
    assert sorted(path.name for path in folder_of_runs.iterdir()) == ["bf16", "fp32"]


def test_a_run_with_another_in_its_folder_is_still_a_run(octavo, finished_run, tmp_path, tiny):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    (folder / "inner").mkdir()
    (folder / "inner" / "config.toml").write_text(tiny.read_text())
    assert octavo("eval", folder).exit_code == 0
