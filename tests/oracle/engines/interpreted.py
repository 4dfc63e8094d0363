"""Other engines' Triton kernels in a process of their own, under Triton's interpreter: it is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

__all__ = ["cast_by_peer", "run_interpreted"]

ROOT = Path(__file__).parents[3]
SKIPPED = 77
FRAME = """
import sys, torch, pytest
tensors = torch.load(sys.argv[1])
try:
{body}
except pytest.skip.Exception as reason:
    sys.exit(str(reason) and print(reason) or {skipped})
torch.save({{name: [t.contiguous() for t in pair] for name, pair in results.items()}}, sys.argv[2])
"""


def run_interpreted(script: str, tensors: dict[str, Tensor], folder: Path) -> dict[str, list[Tensor]]:
    """Run a script that makes ``results``, pairs of tensors, from ``tensors``; skip if it skips."""
    given, made, program = folder / "given.pt", folder / "made.pt", folder / "program.py"
    torch.save(tensors, given)
    body = "\n".join(f"    {line}" for line in script.strip().splitlines())
    program.write_text(FRAME.format(body=body, skipped=SKIPPED))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, str(program), str(given), str(made)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    results: dict[str, list[Tensor]] = torch.load(made)
    return results


def cast_by_peer(quotients: Tensor) -> Tensor:
    """FP32 within E4M3's range, rounded by ml_dtypes."""
    codes = quotients.numpy().astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
