"""Where Triton's kernels are tried: on the GPU if there is one, in Triton's interpreter on the CPU if not."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
