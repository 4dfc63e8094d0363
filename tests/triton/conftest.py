"""Where Triton's kernels are tried: on the GPU if there is one, in Triton's interpreter on the CPU if not."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_chance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that holds nothing yet is NaN, or the largest integer: what a kernel reads of it shows in its result."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # without, torch fills no memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic", UserWarning)  # of a GPU's operations, as they are
        yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


PrintedBy = Callable[..., list[dict]]


@pytest.fixture(scope="session")
def printed_by() -> PrintedBy:
    """What a module prints, JSON line by line, in a process of its own, whose Triton interprets nothing."""

    def run(module: str, **variables: str) -> list[dict]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
        command = [sys.executable, "-m", module]
        finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert finished.returncode == 0, finished.stderr
        return [json.loads(line) for line in finished.stdout.splitlines()]

    return run
