"""Fixed seed, no time limits from hypothesis, the tokens of tiny runs, time for a run, and a count of GPU tests.

A GPU test carries the marker ``gpu``. Where there is no CUDA device it is skipped, and the closing summary says how
many were, so that a green run on a CPU is not mistaken for a green run on a GPU.

Triton's kernels run in its interpreter where there is no GPU. It must be told before Triton is imported first.
"""

import gc
import hashlib
import os
import random
import time
from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import pytest
import torch

from tests.interpreter import prepare_interpreter

if TYPE_CHECKING:
    from octavo.text.tokens import TokenData

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    prepare_interpreter()

# No test asserts a time, not even by accident: a slow machine must not make a property fail.
hypothesis.settings.register_profile("octavo", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("octavo")


BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="begin no test marked long after so many; each run another order")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers for a test wherever it runs: alone, in another order, or on another worker."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the legacy generator is the one that libraries draw from
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> "TokenData":
    """The tokens of :func:`tests.unit.training.tiny_runs.tiny_data`, prepared once; tests only read them."""
    from tests.unit.training.tiny_runs import tiny_data  # GPU tests may run where there are no tokenizers

    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def forked_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are read back by :mod:`tests.forked_verification`, not by a Python that starts for each."""
    from tests.forked_verification import install  # as above

    install(monkeypatch)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("minutes") is not None:
        items.sort(key=_turn)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="gpu: this machine has no CUDA device"))


def _turn(item: pytest.Item) -> str:
    """Key that puts long tests last, file by file, in an order of this run that all of its workers share."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    return hashlib.sha256(f"{run}{item.path}".encode()).hexdigest() if item.get_closest_marker("long") else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes is not None and item.get_closest_marker("long") and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"long: the run's {minutes:g} minutes were over")


def pytest_collection_finish() -> None:
    """Let no garbage collection look again through the million objects that imports and collected tests are."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many GPU tests ran and how many did not, also when there were none."""
    gpu = {
        outcome: sum(
            1
            for report in terminalreporter.stats.get(outcome, [])
            if isinstance(report, pytest.TestReport) and "gpu" in report.keywords
        )
        for outcome in ("passed", "failed", "skipped")
    }
    ran = gpu["passed"] + gpu["failed"]
    terminalreporter.write_line(f"GPU tests: {ran} ran, {gpu['skipped']} skipped")
