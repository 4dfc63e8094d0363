"""Memory that ends while several threads work: an error in Python, and kernels that go on working."""

import subprocess
import sys

import pytest

from octavo.kernels import native_bindings

pytestmark = [
    pytest.mark.skipif(native_bindings.why_absent() is not None, reason="native: the kernels are not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is limited and counted as Linux does"),
]

# K is so large that the columns of each thread take 25 MB, and the limit lets the first tries have less.
PROGRAM = """
import resource
from pathlib import Path
import torch
from octavo.kernels.native_gemm import gemm

torch.set_num_threads(2)
a, b = torch.randn(4, 400_000), torch.zeros(256, 400_000, dtype=torch.uint8).view(torch.float8_e4m3fn)
small = a[:, :640].contiguous(), b[:, :640].contiguous()
gemm(*small, out_dtype=torch.float32)
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
for more in (20, 22, 24, 200):
    resource.setrlimit(resource.RLIMIT_AS, (used + (more << 20), resource.RLIM_INFINITY))
    try:
        gemm(a, b, out_dtype=torch.float32)
        print("made")
    except MemoryError:
        print("refused")
    gemm(*small, out_dtype=torch.float32)
"""


@pytest.mark.long
def test_a_thread_without_memory_ends_as_an_error():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    assert (told[0], told[-1]) == ("refused", "made")
