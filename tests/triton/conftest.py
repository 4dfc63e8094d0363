"""Where Triton's kernels are tried: on the GPU if there is one, in Triton's interpreter on the CPU if not."""

import warnings
from collections.abc import Iterator

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
