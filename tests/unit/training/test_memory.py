"""Peak memory sees what is allocated after a reset, and forgets what was before."""

import gc
import mmap

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


@pytest.mark.parametrize("size", [64, 8])
def test_peak_of_a_call_does_not_depend_on_memory_freed_before(size):
    """Blocks of a size that the C allocator keeps when they are freed, and of one that it gives back."""
    if not reset_peak_memory(CPU):
        pytest.skip("this kernel does not let a process reset its peak memory")

    def run():
        return [torch.ones(size * MIB // 4) for _ in range(128 // size)]

    for _ in range(3):
        check_extra_memory(run, 128)
    extra = extra_memory_bytes(CPU, lambda: None)
    assert extra is not None
    assert extra < 2 * MIB


def resident_file_bytes():
    """Resident pages of files, such as torch's libraries, which the kernel may reclaim at any time."""
    (line,) = (line for line in memory.STATUS.read_text().splitlines() if line.startswith("RssFile:"))
    return int(line.split()[1]) * 1024


def check_extra_memory(run, mebibytes):
    """Compare the extra memory of a call with a known amount; file pages reclaimed meanwhile lower the figure."""
    before = resident_file_bytes()
    extra = extra_memory_bytes(CPU, run)
    reclaimed = max(0, before - resident_file_bytes())
    assert extra is not None
    assert (mebibytes - 16) * MIB - reclaimed < extra < (mebibytes + 8) * MIB  # the allocator may have had a block free


class Cycle:
    """An object that only the garbage collector frees, with 24 MiB."""

    def __init__(self):
        self.itself, self.data = self, torch.ones(24 * MIB // 4)


@pytest.mark.parametrize("size", [64, 8])
def test_extra_memory_does_not_depend_on_garbage_from_before(size):
    """Freed during the call, it would be subtracted from the call's own memory."""
    if not reset_peak_memory(CPU):
        pytest.skip("this kernel does not let a process reset its peak memory")

    def run():
        gc.collect()
        return [torch.ones(size * MIB // 4) for _ in range(128 // size)]

    for _ in range(3):
        Cycle()
        check_extra_memory(run, 128)


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
