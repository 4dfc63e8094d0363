"""Commands in this process, as a user's shell would see them, on text and models small enough for a second a test."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from octavo.cli import thread_choice
from octavo.cli.app import app

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
threads = 1
steps = 4
batch_size = 4
context = 32
warmup = 1
eval_interval = 2
eval_tokens = 512
checkpoint_interval = 2
"""


def run_octavo(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="octavo")


@pytest.fixture
def octavo() -> Callable[..., Result]:
    return run_octavo


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text("".join(f"{n} times {n % 7} makes {n * (n % 7)}, of course.\n" for n in range(2000)))
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def setting(text: Path, tiny: Path) -> list[object]:
    """The options that make a run or a study small."""
    return ["--config", tiny, "--data", text]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, setting: list[object]) -> Path:
    """A run that is not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "tensorwise"
    result = run_octavo("train", *setting, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch, groups: Callable[..., object]) -> None:
    """Four cores, of which three are busy."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    groups("0::/\n", {})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(thread_choice, "busy_cores", lambda: 3)
