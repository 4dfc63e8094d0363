"""What a user can get wrong: exit code 2, one sentence, no traceback, nothing half-written.

Most commands run in this process, which saves starting torch each time; a few run as a shell would start them.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from octavo.cli.app import app
from octavo.errors import DataError
from octavo.text.tokens import open_data
from octavo.training import loop

TINY = """
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
num_kv_heads = 1
[data]
vocab_size = 300
[training]
steps = 4
batch_size = 2
context = 32
warmup = 1
eval_interval = 2
eval_tokens = 256
checkpoint_interval = 2
"""
SUMS = "".join(f"{n} times {n % 7} makes {n * (n % 7)}.\n" for n in range(1500))


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def octavo(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="octavo")
    return Result(result.exit_code, result.stdout, result.stderr)


def octavo_process(*args, limit_file_bytes=resource.RLIM_INFINITY):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_file_bytes, limit_file_bytes))

    command = [sys.executable, "-m", "octavo", *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    return Result(result.returncode, result.stdout, result.stderr)


def refusal(result):
    """The one sentence of a refused command; progress lines end in dots or say what is done."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    sentences = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1
    assert result.stderr.rstrip().endswith(sentences[0])
    return sentences[0]


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A configuration, text, and a finished run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "run.toml").write_text(TINY)
    (folder / "own.txt").write_text(SUMS)
    result = octavo("train", "--config", folder / "run.toml", "--data", folder / "own.txt", "--out", folder / "run")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def run(place, tmp_path):
    """A copy of the finished run that a test may damage."""
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


def write_garbage(path):
    path.write_bytes(bytes(range(256)) * 40)


def write_parquet_without_text(path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"body": ["a", "b"], "title": ["c", "d"]}), path)


DATA = {
    "missing.txt": (lambda path: None, "no file or folder"),
    "empty.txt": (lambda path: path.write_text(""), "empty"),
    "binary.txt": (write_garbage, "not text"),
    "short.txt": (lambda path: path.write_text("three short words\n"), "too few for a context"),
    "broken.jsonl": (lambda path: path.write_text('{"text": "a"}\n{"te\n'), "line 2"),
    "columns.parquet": (write_parquet_without_text, "no column 'text'"),
    "torn.parquet": (lambda path: path.write_bytes(b"PAR1 and then nothing"), "parquet"),
    "folder": (lambda path: path.mkdir(), "holds no"),
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_cannot_be_used(place, tmp_path, name):
    make, words = DATA[name]
    make(tmp_path / name)
    result = octavo("train", "--config", place / "run.toml", "--data", tmp_path / name, "--out", tmp_path / "new")
    sentence = refusal(result)
    assert words in sentence
    assert not (tmp_path / "new").exists()


CONFIGS = {
    "[training]\nstepz = 4\n": "did you mean 'steps'",
    "[traning]\nsteps = 4\n": "did you mean 'training'",
    "[training]\nsteps = 'four'\n": "training.steps must be a whole number",
    "[training]\nrecipe = 'tensorwize'\n": "did you mean 'tensorwise'",
    "[training]\nrecipe = 'delayed'\nrecipe_options = { margin = -1 }\n": "margin",
    "[training]\nrecipe = 'delayed'\nrecipe_options = { history_length = 0 }\n": "length",
    "[training]\nprecision = 'fp8'\n": "fp32, bf16",
    "[training\n": "not TOML",
}


@pytest.mark.parametrize("text", CONFIGS)
def test_a_configuration_that_is_not_allowed(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    sentence = refusal(octavo("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "new"))
    assert CONFIGS[text] in sentence
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_a_configuration_that_is_not_there_as_a_shell_sees_it(tmp_path):
    assert "gone.toml" in refusal(
        octavo_process("train", "--config", tmp_path / "gone.toml", "--out", tmp_path / "new")
    )


@pytest.mark.parametrize("command", ["train", "study"])
def test_a_folder_below_a_file_cannot_be_written(place, command):
    out = place / "own.txt" / "run"
    result = octavo(command, "--config", place / "run.toml", "--data", place / "own.txt", "--out", out)
    assert "own.txt" in refusal(result)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; the case below a file is tested")
def test_a_folder_without_permission_cannot_be_written(place, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    result = octavo("train", "--config", place / "run.toml", "--data", place / "own.txt", "--out", closed / "run")
    assert "permission denied" in refusal(result).lower()


# Without its state.json a folder is an unfinished checkpoint, and the one before it is used.
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
DAMAGES = [(name, damage) for name in FILES for damage in ("truncate", "flip", "remove")]
DAMAGES.remove(("state.json", "remove"))


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_named(run, name, damage):
    file = max(run.glob("checkpoints/step-*")) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    match damage:
        case "truncate":
            file.write_bytes(file.read_bytes()[:-20])
        case "flip":
            file.write_bytes(content)
        case "remove":
            file.unlink()
    reads_optimizer = name == "optimizer.safetensors"
    command = ["train", "--out", run, "--resume"] if reads_optimizer else ["eval", run]
    before = files_of(run)
    assert name in refusal(octavo(*command))
    unchanged = {path: content for path, content in before.items() if "checkpoints" in path.parts}
    assert {path: content for path, content in files_of(run).items() if "checkpoints" in path.parts} == unchanged


def test_resuming_with_another_model_is_refused(place, run):
    (place / "wide.toml").write_text(TINY.replace("hidden_size = 32", "hidden_size = 64"))
    before = files_of(run)
    arguments = ["--config", place / "wide.toml", "--data", place / "own.txt", "--out", run, "--resume"]
    sentence = refusal(octavo("train", *arguments))
    assert "model.hidden_size = 32, not 64" in sentence
    assert files_of(run) == before


def test_resuming_on_other_text_is_refused(run, tmp_path):
    (tmp_path / "other.txt").write_text(SUMS.upper())
    before = files_of(run)
    assert "data" in refusal(octavo("train", "--data", tmp_path / "other.txt", "--out", run, "--resume"))
    assert files_of(run) == before


def test_resuming_on_other_text_under_the_same_name_is_refused(place, tmp_path):
    shutil.copy(place / "own.txt", tmp_path / "own.txt")
    arguments = ["--config", place / "run.toml", "--data", tmp_path / "own.txt", "--out", tmp_path / "run"]
    assert octavo("train", *arguments).returncode == 0
    (tmp_path / "own.txt").write_text(SUMS.upper())
    before = files_of(tmp_path / "run")
    assert "was trained on other text" in refusal(octavo("train", "--out", tmp_path / "run", "--resume"))
    assert files_of(tmp_path / "run") == before


@pytest.mark.long
def test_a_disk_that_takes_no_more_leaves_no_half_checkpoint(place, tmp_path):
    """A limit on file sizes stands for the full disk: the optimizer's file does not fit, the model's does."""
    out = tmp_path / "run"
    arguments = ["--config", place / "run.toml", "--data", place / "own.txt", "--out", out]
    sentence = refusal(octavo_process("train", *arguments, limit_file_bytes=200_000))
    assert "checkpoints" in sentence
    assert list((out / "checkpoints").iterdir()) == []
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


@pytest.mark.long
def test_a_disk_that_takes_no_tokens_leaves_no_half_data(place, tmp_path):
    out = tmp_path / "run"
    arguments = ["--config", place / "run.toml", "--data", place / "own.txt", "--out", out]
    refusal(octavo_process("train", *arguments, limit_file_bytes=2_000))
    with pytest.raises(DataError, match="not a complete data folder"):
        open_data(out / "data")
    assert not out.exists()
    assert octavo("train", *arguments).returncode == 0


def test_two_processes_do_not_train_in_one_folder(place, run):
    import fcntl

    with (Path(run) / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process" in refusal(octavo("train", "--out", run, "--resume"))


@pytest.mark.parametrize("command", ["train", "study"])
@pytest.mark.parametrize("batch_size", [3_000_000_000, 10**11])
def test_a_batch_that_does_not_fit_in_memory(place, tmp_path, command, batch_size):
    arguments = ["--config", place / "run.toml", "--data", place / "own.txt", "--out", tmp_path / "new"]
    result = octavo(command, *arguments, "--batch-size", batch_size)
    assert f"batch_size {batch_size} and context 32 does not fit" in refusal(result)
    assert "read ..." not in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "study"])
def test_memory_that_runs_out_in_the_first_step_does_not_block_the_next_command(place, tmp_path, monkeypatch, command):
    out = tmp_path / "new"
    arguments = [command, "--config", place / "run.toml", "--data", place / "own.txt", "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "token_loss", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
        assert "batch_size 2 and context 32 does not fit" in refusal(octavo(*arguments))
    assert {path.relative_to(out).parts[0] for path in out.rglob("*")} == {"data"}
    assert octavo(*arguments, "--batch-size", 1).returncode == 0


@pytest.mark.parametrize("command", ["train", "study"])
def test_a_gpu_that_is_not_there_is_refused_before_the_text_is_read(place, tmp_path, monkeypatch, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--config", place / "run.toml", "--data", place / "own.txt", "--out", tmp_path / "new"]
    result = octavo(command, *arguments, "--device", "cuda")
    assert "torch sees no CUDA device" in refusal(result)
    assert "read ..." not in result.stderr
    assert not (tmp_path / "new").exists()
