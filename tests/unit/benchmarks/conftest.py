"""The result file of a benchmark that a test runs, kept out of benchmarks/results."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import measure


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """Lines of the one result that was written."""
    monkeypatch.setattr(measure, "RESULTS", tmp_path)

    def read() -> list[str]:
        (path,) = tmp_path.iterdir()
        return path.read_text().splitlines()

    return read
