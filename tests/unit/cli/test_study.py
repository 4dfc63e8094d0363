"""``octavo study``: the table, the JSON, the files, and the second call."""

import fcntl
import json
import shutil

import pytest

from octavo.training.config import load_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("study") / "runs"


@pytest.fixture(scope="module")
def printed(folder, setting):
    from tests.unit.cli.conftest import run_octavo

    result = run_octavo("study", *setting, "--out", folder)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.long
def test_the_table_has_every_measure(printed):
    for row in ("Final perplexity", "Steps to perplexity", "Gradient variance", "Tokens/s", "Peak memory"):
        assert row in printed.stdout
    assert "emulated" in printed.stdout
    assert "0.0050 nats" in " ".join(printed.stdout.split())


@pytest.mark.long
def test_the_files_named_are_there(printed, folder):
    assert {"config.toml", "study.json", "report.html", "data", "fp32", "bf16", "tensorwise"} <= {
        path.name for path in folder.iterdir()
    }
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_a_second_call_trains_nothing_and_prints_the_same(octavo, printed, folder, setting):
    again = octavo("study", *setting, "--out", folder)
    assert again.stdout == printed.stdout
    assert "train" not in again.stderr


def test_json_is_all_of_stdout(octavo, printed, folder, setting):
    record = json.loads(octavo("study", *setting, "--out", folder, "--json").stdout)
    assert [run["recipe"] for run in record["runs"]] == ["fp32", "bf16", "tensorwise"]
    by_recipe = {run["recipe"]: run["nats"] for run in record["runs"]}
    gap = next(gap for gap in record["gaps"] if gap["base"] == "bf16")
    assert gap["nats"] == pytest.approx(by_recipe["tensorwise"] - by_recipe["bf16"], abs=1e-12)


def test_another_configuration_needs_force(octavo, printed, folder, setting):
    arguments = ["study", *setting, "--out", folder, "--seed", "9"]
    result = octavo(*arguments)
    assert result.exit_code == 2
    assert "--force" in result.stderr
    (folder / "notes.txt").write_text("mine")
    forced = octavo(*arguments, "--recipes", "fp32", "--force")
    assert forced.exit_code == 0, forced.output
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_study_is_not_a_run(octavo, printed, folder):
    for command in (["eval", folder], ["generate", folder, "--prompt", "x"]):
        result = octavo(*command)
        assert result.exit_code == 2
        assert "name one of" in result.stderr


def test_unknown_recipes_write_nothing(octavo, setting, tmp_path):
    result = octavo("study", *setting, "--out", tmp_path / "new", "--recipes", "fp32,fp9")
    assert result.exit_code == 2
    assert "fp9" in result.stderr
    assert not (tmp_path / "new").exists()


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, setting):
    from tests.unit.cli.conftest import run_octavo

    folder = tmp_path_factory.mktemp("finished") / "runs"
    result = run_octavo("study", *setting, "--out", folder, "--recipes", "fp32,tensorwise")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """A finished study that a test may damage."""
    return shutil.copytree(finished, tmp_path / "runs")


@pytest.fixture
def refused(octavo, setting, tmp_path):
    """Call the study in a folder; it must refuse in one sentence with these words and change nothing there."""

    def refused(folder, *more, words):
        before = contents(folder)
        arguments = ["study", *setting, "--out", folder, "--recipes", "fp32,tensorwise", *more]
        result = octavo(*arguments)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
        assert contents(folder) == before
        return result.stderr

    return refused


SHORT = "three short words\n"


@pytest.mark.long
@pytest.mark.parametrize(("content", "words"), [(None, "no file or folder"), ("", "is empty"), (SHORT, "too few")])
def test_force_refuses_a_source_before_it_removes_anything(refused, copy, tmp_path, content, words):
    if content is not None:
        (tmp_path / "bad.txt").write_text(content)
    refused(copy, "--force", "--data", tmp_path / "bad.txt", words=words)


@pytest.mark.long
def test_force_refuses_a_model_before_it_removes_anything(refused, copy, tiny, tmp_path):
    (tmp_path / "skip.toml").write_text(tiny.read_text() + 'skip = ["zz"]\n')
    refused(copy, "--force", "--config", tmp_path / "skip.toml", "--vocab-size", "290", words="zz")


def test_force_refuses_a_run_in_training_before_it_removes_anything(refused, copy):
    with (copy / "tensorwise" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(copy, "--force", "--vocab-size", "290", words="another process")


@pytest.mark.parametrize("name", ["checkpoints/notes.txt", "checkpoints/step-000004/notes.txt", "checkpoints/mine/a"])
def test_force_refuses_a_users_file_among_checkpoints_before_it_removes_anything(refused, copy, name):
    (copy / "tensorwise" / name).parent.mkdir(exist_ok=True)
    (copy / "tensorwise" / name).write_text("mine")
    refused(copy, "--force", "--vocab-size", "290", words="is not a checkpoint's; move it")


@pytest.mark.long
def test_other_text_under_the_same_name_is_refused_before_the_tokens_change(octavo, refused, text, tiny, tmp_path):
    shutil.copy(text, tmp_path / "own.txt")
    setting = ["--config", tiny, "--data", tmp_path / "own.txt"]
    assert octavo("study", *setting, "--out", tmp_path / "runs", "--recipes", "fp32,tensorwise").exit_code == 0
    (tmp_path / "own.txt").write_text(text.read_text().upper())
    refused(tmp_path / "runs", "--data", tmp_path / "own.txt", words="was trained on other text")


@pytest.mark.parametrize(
    "name", ["config.toml", "tokenizer.json", "measures.json", "checkpoints/step-000004/state.json"]
)
def test_a_damaged_run_is_named_with_what_the_command_has(refused, copy, name):
    (copy / "study.json").unlink()
    (copy / "tensorwise" / name).write_text("torn")
    assert "--resume" not in refused(copy, words=name)


def test_a_run_without_its_configuration_is_named_with_what_the_command_has(refused, copy):
    (copy / "tensorwise" / "config.toml").unlink()
    assert "--resume" not in refused(copy, words="name another folder with --out")


@pytest.mark.parametrize(
    "name", ["data/train.bin", "data/manifest.json", "fp32/config.toml", "fp32/tokenizer.json", "report.html"]
)
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_other_files_are_kept(octavo, setting, tmp_path, name, force):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine = 1")
    result = octavo("study", *setting, "--out", tmp_path, "--recipes", "fp32", *force)
    assert result.exit_code == 2, result.output
    assert (tmp_path / name).read_text() == "mine = 1"


@pytest.mark.long
def test_force_keeps_the_users_files_inside_a_studys_folders(octavo, setting, tmp_path):
    arguments = ["study", *setting, "--out", tmp_path, "--recipes", "fp32"]
    assert octavo(*arguments).exit_code == 0
    mine = [tmp_path / name / "notes.txt" for name in (".", "data", "fp32", "fp32/tensorboard")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (tmp_path / "bf16").mkdir()
    (tmp_path / "bf16" / "paper.txt").write_text("mine")
    forced = octavo(*arguments, "--force", "--seed", "9")
    assert forced.exit_code == 0, forced.output
    assert load_config(tmp_path / "fp32" / "config.toml").training.seed == 9
    assert all(path.read_text() == "mine" for path in (*mine, tmp_path / "bf16" / "paper.txt"))


def test_unknown_layer_is_refused_before_the_first_run(octavo, tiny, text, tmp_path):
    config = tmp_path / "skip.toml"
    config.write_text(tiny.read_text() + 'skip = ["zz"]\n')
    arguments = ["study", "--data", text, "--out", tmp_path / "new"]
    result = octavo(*arguments, "--config", config)
    assert result.exit_code == 2
    assert "zz" in result.stderr
    assert not (tmp_path / "new").exists()


NOTE = "3 of 4 cores are busy; training with 1 thread (set --threads to change)"


@pytest.mark.long
def test_threads_default_to_free_cores(octavo, busy_machine, tiny, text, tmp_path):
    silent = tmp_path / "silent.toml"
    silent.write_text(tiny.read_text().replace("threads = 1\n", ""))

    def threads(out, config, *options):
        arguments = ["--config", config, "--data", text, "--recipes", "fp32", "--out", tmp_path / out, *options]
        result = octavo("study", *arguments)
        assert result.exit_code == 0, result.output
        configs = [load_config(tmp_path / out / name / "config.toml") for name in (".", "fp32")]
        return [each.training.threads for each in configs], NOTE in result.stderr

    assert threads("new", silent) == ([1, 1], True)
    assert threads("new", silent) == ([1, 1], False), "a begun study keeps its number"
    assert threads("new", tiny, "--threads", 1) == ([1, 1], False)
    assert threads("given", silent, "--threads", 2) == ([2, 2], False)
    assert threads("given", silent, "--force") == ([1, 1], True)
    assert threads("said", tiny) == ([1, 1], False)
