"""Peak memory sees what is allocated after a reset, and forgets what was before."""

import mmap
import subprocess
import sys

import pytest
import torch

from octavo.training import memory
from octavo.training.loop import train
from octavo.training.memory import extra_memory_bytes, peak_memory_bytes, reset_peak_memory
from tests.unit.training.tiny_runs import tiny_config, tiny_data

CPU = torch.device("cpu")
MIB = 2**20


def touch(mebibytes):
    """Use fresh pages straight from the kernel, and give them back."""
    with mmap.mmap(-1, mebibytes * MIB) as block:
        for offset in range(0, len(block), mmap.PAGESIZE):
            block[offset] = 1


def test_peak_rises_with_use_and_falls_with_a_reset():
    if not reset_peak_memory(CPU):
        pytest.skip("this kernel does not let a process reset its peak memory")
    before = peak_memory_bytes(CPU)
    touch(256)
    used = peak_memory_bytes(CPU) - before
    assert 240 * MIB < used < 300 * MIB
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) - before < 100 * MIB


PROGRAM = """
import gc, torch
from octavo.training.memory import extra_memory_bytes

CPU = torch.device("cpu")

class Cycle:
    def __init__(self):
        self.itself, self.data = self, torch.ones(24 * 2**20 // 4)

for size in 64, 8:
    def run(collect=False):
        if collect:
            gc.collect()
        return [torch.ones(size * 2**20 // 4) for _ in range(128 // size)]

    freed = [extra_memory_bytes(CPU, run) for _ in range(3)]
    nothing = extra_memory_bytes(CPU, lambda: None)
    garbage = []
    for _ in range(3):
        Cycle()
        garbage.append(extra_memory_bytes(CPU, lambda: run(collect=True)))
    print(*freed, nothing, *garbage)
"""


@pytest.fixture(scope="module")
def extra_mebibytes():
    """What a program prints in a new process, without other tests' garbage and free blocks, by the size of blocks.

    First of a size that the C allocator gives back when it is freed, then of one that it keeps.
    """
    if not reset_peak_memory(CPU):
        pytest.skip("this kernel does not let a process reset its peak memory")
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    large, small = ([int(figure) / MIB for figure in line.split()] for line in result.stdout.splitlines())
    return {64: large, 8: small}


@pytest.mark.long
@pytest.mark.parametrize("size", [64, 8])
def test_peak_of_a_call_does_not_depend_on_memory_freed_before(size, extra_mebibytes):
    *extra, nothing = extra_mebibytes[size][:4]
    assert len(extra) == 3
    assert all(120 < each < 136 for each in extra)
    assert nothing < 2


@pytest.mark.long
@pytest.mark.parametrize("size", [64, 8])
def test_extra_memory_does_not_depend_on_garbage_from_before(size, extra_mebibytes):
    """Freed during the call, it would be subtracted from the call's own memory."""
    extra = extra_mebibytes[size][4:]
    assert len(extra) == 3
    assert all(120 < each < 136 for each in extra)


def test_peak_of_a_call_is_none_if_it_cannot_be_reset(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "no" / "clear_refs")
    assert extra_memory_bytes(CPU, lambda: None) is None


def test_peak_without_proc_is_that_of_the_process(tmp_path, monkeypatch):
    real = peak_memory_bytes(CPU)
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "no" / "clear_refs")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "no" / "status")
    assert reset_peak_memory(CPU) is False
    assert peak_memory_bytes(CPU) > 0.5 * real


def test_a_run_does_not_count_what_was_freed_before_it(tmp_path):
    if not reset_peak_memory(CPU):
        pytest.skip("this kernel does not let a process reset its peak memory")
    data = tiny_data(tmp_path)
    touch(512)
    high = peak_memory_bytes(CPU)
    assert train(tiny_config(steps=1), tmp_path / "run", data=data).peak_memory_bytes < high - 256 * MIB


@pytest.mark.gpu
def test_cuda_counts_the_allocator():
    device = torch.device("cuda")
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    del block
    assert 64 * MIB <= peak_memory_bytes(device) - before < 80 * MIB
