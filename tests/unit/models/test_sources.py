"""What a path is: a run, a Hugging Face folder or a GGUF file, by names of files alone."""

import pytest

from octavo.errors import CheckpointError, ConfigError
from octavo.models.sources import SourceKind, is_gguf, kind_of


def made(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json", "metrics.jsonl", "checkpoints/latest"])
def test_any_file_of_a_run_identifies_a_run(tmp_path, name):
    assert kind_of(made(tmp_path, name)) is SourceKind.RUN


def test_config_json_takes_precedence_over_files_of_a_run(tmp_path):
    folder = made(tmp_path, "config.json", "config.toml", "tokenizer.json", "checkpoints/latest")
    assert kind_of(folder) is SourceKind.HUGGING_FACE


def test_gguf_is_recognized_by_suffix_even_if_missing(tmp_path):
    assert kind_of(tmp_path / "missing.GGUF") is SourceKind.GGUF
    assert is_gguf("a/b.gguf")
    assert not is_gguf("a/b.gguf/c")


def test_a_study_is_refused_with_its_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"holds a study of several runs; name one of .*tensorwise"):
        kind_of(made(tmp_path, "config.toml", "tensorwise/config.toml"))


@pytest.mark.parametrize("names", [(), ("model.safetensors",)])
def test_folder_of_other_files_is_refused(tmp_path, names):
    with pytest.raises(CheckpointError, match="is not a model; give a run's folder"):
        kind_of(made(tmp_path, *names))
