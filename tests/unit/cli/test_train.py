"""``octavo train``: what it leaves behind, and that resuming reaches the same numbers."""

import json
import os
import shlex
import shutil
import signal

import pytest

import octavo.cli.train as command
from octavo.training.config import load_config


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "sha256")} for line in lines]


def test_a_run_leaves_its_folder(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert {"config.toml", "metrics.jsonl", "checkpoints", "tokenizer.json", "data"} <= names
    assert load_config(finished_run / "config.toml").training.recipe == "tensorwise"
    assert [line["step"] for line in losses(finished_run) if line["kind"] == "step"] == [1, 2, 3, 4]


def test_options_override_the_file(octavo, setting, tmp_path):
    options = ["--steps", 2, "--lr", 0.001, "--seed", 5, "--recipe", "bf16", "--batch-size", 2]
    result = octavo("train", *setting, "--out", tmp_path / "run", *options, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["steps"] == 2
    training = load_config(tmp_path / "run" / "config.toml").training
    assert (training.lr, training.seed, training.recipe, training.batch_size) == (0.001, 5, "bf16", 2)


def test_a_layout_is_refused_before_text_is_read(octavo, tmp_path):
    result = octavo("train", "--out", tmp_path / "run", "--data", tmp_path / "missing.txt", "--shard", 2)
    assert result.exit_code == 2
    assert "[parallel] shard = 2 needs a multiple of 2 ranks, and 1 is running" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("number", "step", "words"),
    [
        (signal.SIGINT, 3, "stopped after step 3, checkpoint saved"),
        (signal.SIGTERM, 3, "stopped after step 3, checkpoint saved"),
        (signal.SIGTERM, 0, "stopped before the first step"),
    ],
)
def test_resume_matches_uninterrupted_run(octavo, setting, tmp_path, finished_run, monkeypatch, *, number, step, words):
    watch = command._watch

    def interrupting(display, recipe, steps):
        inner = watch(display, recipe, steps)

        def on_event(event):
            inner(event)
            if step == 0 or (getattr(event, "loss", None) is not None and event.step == step):
                os.kill(os.getpid(), number)

        return on_event

    monkeypatch.setattr(command, "_watch", interrupting)
    first = octavo("train", *setting, "--out", tmp_path / "my run")
    assert first.exit_code == 128 + number
    assert words in first.stderr
    again = first.stderr.strip().splitlines()[-1].rpartition(": octavo ")[2]
    monkeypatch.setattr(command, "_watch", watch)
    second = octavo(*shlex.split(again))
    assert second.exit_code == 0, second.output
    assert losses(tmp_path / "my run") == losses(finished_run)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume"], "no run to resume"),
        (["--recipe", "fp9"], "not 'fp9'"),
        (["--steps", "0"], "training.steps must be at least 1"),
        (["--lr", "-1"], "training.lr"),
        (["--schedule", "bf16"], "such as 'bf16:0.0,fp8:0.8'"),
        (["--schedule", "bf16:0.5"], "must begin with 0.0"),
        (["--recipe", "bf16", "--schedule", "fp8:0.0"], "needs an FP8 recipe"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--vocab-size", "10"], "257"),
        (["--steps", "many"], "--steps"),
    ],
)
def test_a_bad_value_is_named_and_nothing_is_written(octavo, setting, tmp_path, arguments, words):
    result = octavo("train", *setting, "--out", tmp_path / "new", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "new").exists()


def test_schedule_changes_the_recipe(octavo, setting, tmp_path):
    result = octavo("train", *setting, "--out", tmp_path / "run", "--schedule", "bf16:0.0, fp8:0.5")
    assert result.exit_code == 0, result.output
    assert [line for line in losses(tmp_path / "run") if line["kind"] == "precision"] == [
        {"kind": "precision", "step": 3, "recipe": "tensorwise"}
    ]
    assert "step 3: the layers run tensorwise from now on" in result.stderr
    assert octavo("eval", tmp_path / "run").exit_code == 0


def test_a_second_run_in_the_same_folder_is_refused(octavo, setting, finished_run):
    before = losses(finished_run)
    result = octavo("train", *setting, "--out", finished_run)
    assert result.exit_code == 2
    assert "--resume" in result.stderr
    assert losses(finished_run) == before


def test_a_data_folder_of_the_users_own_is_left_alone(octavo, setting, tmp_path):
    mine = {name: tmp_path / "data" / name for name in ("manifest.json", "tokenizer.json", "train.bin")}
    (tmp_path / "data").mkdir()
    for name, path in mine.items():
        path.write_text(f'{{"mine": "{name}"}}')
    result = octavo("train", *setting, "--out", tmp_path)
    assert result.exit_code == 2
    assert "holds other files" in result.stderr
    assert {name: path.read_text() for name, path in mine.items()} == {n: f'{{"mine": "{n}"}}' for n in mine}


def test_a_finished_run_that_is_resumed_has_no_speed(octavo, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    result = octavo("train", "--out", tmp_path / "run", "--resume")
    assert result.exit_code == 0, result.output
    assert "nan" not in result.stdout.split()


def threads_of(octavo, run, *options):
    result = octavo("train", "--out", run, *options)
    assert result.exit_code == 0, result.output
    return load_config(run / "config.toml").training.threads, result.stderr


NOTE = "3 of 4 cores are busy; training with 1 thread (set --threads to change)"


@pytest.mark.long
def test_threads_default_to_free_cores(octavo, busy_machine, tiny, text, tmp_path):
    silent = tmp_path / "silent.toml"
    silent.write_text(tiny.read_text().replace("threads = 1\n", ""))
    options = ["--config", silent, "--data", text]
    threads, said = threads_of(octavo, tmp_path / "run", *options)
    assert (threads, NOTE in said) == (1, True)
    threads, said = threads_of(octavo, tmp_path / "run", *options, "--resume")
    assert (threads, NOTE in said) == (1, False), "a begun run keeps its number"
    threads, said = threads_of(octavo, tmp_path / "given", *options, "--threads", 2)
    assert (threads, NOTE in said) == (2, False)
    silent.write_text(tiny.read_text().replace("threads = 1\n", "threads = 0\n"))
    threads, said = threads_of(octavo, tmp_path / "zero", *options)
    assert (threads, NOTE in said) == (0, False)


@pytest.fixture
def begun_run(finished_run, tmp_path):
    """A run that a test may damage."""
    return shutil.copytree(finished_run, tmp_path / "run")


def other_vocabulary(tokenizer):
    """The same tokenizer with the last two tokens' ids exchanged."""
    content = json.loads(tokenizer)
    ids = content["model"]["vocab"]
    last, before = sorted(ids, key=ids.get)[-1:-3:-1]
    ids[last], ids[before] = ids[before], ids[last]
    return json.dumps(content)


@pytest.mark.parametrize("damage", [other_vocabulary, lambda tokenizer: tokenizer[:100]])
def test_a_run_is_not_resumed_with_another_tokenizer(octavo, begun_run, damage):
    path = begun_run / "tokenizer.json"
    path.write_text(damage(path.read_text()))
    before = {each: each.read_bytes() for each in begun_run.rglob("*") if each.is_file()}
    result = octavo("train", "--out", begun_run, "--resume")
    assert result.exit_code == 2
    assert f"'{path}' is not the tokenizer of the run's tokens" in result.stderr
    assert {each: each.read_bytes() for each in begun_run.rglob("*") if each.is_file()} == before


def test_a_tokenizer_that_is_missing_is_written_again(octavo, begun_run):
    path = begun_run / "tokenizer.json"
    before = path.read_text()
    path.unlink()
    assert octavo("train", "--out", begun_run, "--resume").exit_code == 0
    assert path.read_text() == before


def test_log_chooses_the_loggers_and_resuming_may_choose_others(octavo, setting, tmp_path):
    out = tmp_path / "run"
    assert octavo("train", *setting, "--out", out, "--log", "").exit_code == 0
    assert not (out / "tensorboard").exists()
    result = octavo("train", "--out", out, "--resume", "--log", "wandbb")
    assert result.exit_code == 2
    assert "training.log must be one of tensorboard, wandb, mlflow, trackio, not 'wandbb'" in result.stderr
    assert octavo("train", "--out", out, "--resume", "--log", "tensorboard").exit_code == 0


def mlflow_losses(_name):
    import mlflow

    (run,) = mlflow.search_runs(experiment_names=["octavo"], output_format="list")
    assert run.data.params["training.steps"] == "4"
    return [(at.step, at.value) for at in mlflow.MlflowClient().get_metric_history(run.info.run_id, "step/loss")]


def trackio_losses(name):
    from trackio.sqlite_storage import SQLiteStorage

    return [(row["step"], row["step/loss"]) for row in SQLiteStorage.get_logs("octavo", name) if "step/loss" in row]


@pytest.mark.parametrize(("logger", "logged"), [("mlflow", mlflow_losses), ("trackio", trackio_losses)])
def test_logger_holds_the_runs_losses(octavo, setting, tmp_path, monkeypatch, *, logger, logged):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder; a database needs more than mlflow-skinny
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(logger, reason=f"{logger} is not installed")
    result = octavo("train", *setting, "--out", tmp_path / "run", "--log", logger, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 4  # the library's own messages are not in it
    assert "receives no more numbers" not in result.stderr
    assert logged("run") == [
        (line["step"], line["loss"]) for line in losses(tmp_path / "run") if line["kind"] == "step"
    ]


def test_named_data_set_is_read_with_hub_alone(octavo, tiny, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed; octavo[hf]")
    rows = "".join(json.dumps({"body": f"{n} and {n % 7} make {n + n % 7}.\n" * 9}) + "\n" for n in range(500))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text(rows)
    real = datasets.load_dataset  # of a folder in place of the Hub
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: [])
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *rest, **more: real(str(tmp_path / "hub"), *rest, **more)
    )
    command = ["train", "--config", tiny, "--data", "someone/rows", "--text-column", "body", "--out", tmp_path / "run"]
    refused = octavo(*command)
    assert refused.exit_code == 2
    assert "pass --hub to read that data set from the Hub" in refused.stderr
    result = octavo(*command, "--hub")
    assert result.exit_code == 0, result.output
    assert load_config(tmp_path / "run" / "config.toml").data.source == "someone/rows?column=body"
    assert octavo("train", "--out", tmp_path / "run", "--resume").exit_code == 2, "the permission ends with the command"


def test_missing_logger_is_refused_before_any_text_is_read(octavo, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.training.metric_writers.importlib.util.find_spec", lambda name: None)
    result = octavo("train", "--log", "wandb", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "logging to wandb needs its package; pip install wandb" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_new_run_begins_at_another_runs_checkpoint(octavo, finished_run, tmp_path):
    start = finished_run / "checkpoints" / "step-000002"
    config = tmp_path / "fixed.toml"
    config.write_text((finished_run / "config.toml").read_text().replace('recipe = "tensorwise"', 'recipe = "rowwise"'))
    result = octavo("train", "--config", config, "--from", start, "--out", tmp_path / "again")
    assert result.exit_code == 0, result.output
    ours, theirs = losses(tmp_path / "again"), losses(finished_run)
    until = [line for line in theirs if line["step"] <= 2]
    assert ours[: len(until)] == until
    assert [line["step"] for line in ours if line["kind"] == "step"] == [1, 2, 3, 4]
    assert load_config(tmp_path / "again" / "config.toml").training.recipe == "rowwise"
    refused = octavo("train", "--out", tmp_path / "again", "--from", start, "--resume")
    assert refused.exit_code == 2
    assert "--from begins a new one" in refused.stderr
    missing = octavo("train", "--config", config, "--from", finished_run, "--out", tmp_path / "other")
    assert missing.exit_code == 2
    assert not (tmp_path / "other" / "config.toml").exists()
