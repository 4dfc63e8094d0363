"""Threads: whose they are, that they are given back, and that none changes a result.

tests/native/threads.cpp tries those of octavo's own: parts, late threads, exceptions.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from octavo.kernels import native_bindings
from octavo.kernels.threads import check_threads, count_threads, release_threads

pytestmark = [
    pytest.mark.skipif(native_bindings.why_absent() is not None, reason="native: the kernels are not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in Linux's /proc"),
]


def threads_of_process() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def threads_left(expected: int) -> int:
    """A thread takes a moment to end."""
    for _ in range(500):
        if threads_of_process() <= expected:
            break
        time.sleep(0.01)
    return threads_of_process()


def test_thread_team_ends_on_release_and_restarts_on_demand():
    found = []

    def work():
        torch.set_num_threads(3)
        before = threads_of_process()
        for _ in range(2):
            torch.ones(10**6).exp()
            found.append((count_threads(), threads_of_process() - before))
            release_threads()
            found.append((count_threads(), threads_left(before) - before))

    threads = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(threads)
    assert found == [(3, 2), (3, 0), (3, 2), (3, 0)]


def run(program: str) -> str:
    """What a new process prints: one in which no other test has left threads."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RESULTS = """
import torch
from octavo import E4M3, PerRow, PerTensor, quantize, scaled_mm
from octavo.kernels import native_bindings

def results():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(96, 512, generator=generator), torch.randn(640, 512, generator=generator)
    a, b = quantize(x, E4M3, granularity=PerRow()), quantize(w, E4M3, granularity=PerTensor())
    row = quantize(x[:1], E4M3, granularity=PerTensor())
    products = (scaled_mm(one, b, out_dtype=torch.float32).view(torch.uint8) for one in (a, row))
    return [one.clone() for one in (a.data.view(torch.uint8), a.scale, b.data.view(torch.uint8), b.scale, *products)]

def same(one, other):
    return all(map(torch.equal, one, other))

torch.set_num_threads(1)
alone = results()
torch.set_num_threads(3)
"""


@pytest.mark.long
def test_results_are_the_same_on_a_busy_machine():
    told = run(
        RESULTS
        + """
print(same(alone, results()))
native_bindings.extension().assume_busy(600)
print(native_bindings.extension().is_busy(), all(same(alone, results()) for _ in range(50)))
native_bindings.extension().assume_busy(0)
print(native_bindings.extension().is_busy(), same(alone, results()))
"""
    )
    assert told.split() == ["True", "True", "True", "False", "True"]


@pytest.mark.long
def test_a_forked_process_has_threads_of_its_own():
    """OpenMP's team stays with the parent: a child that worked with it would wait for its threads for ever."""
    told = run(
        """
import os, signal
import torch
from octavo import E4M3, PerRow, quantize

torch.set_num_threads(3)
x = torch.randn(1024, 256)

def codes():  # no operation of torch's, which would wait in the child, too
    return bytes(quantize(x, E4M3, granularity=PerRow()).data.view(torch.uint8).numpy())

before = codes()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if codes() == before else 1)
print(os.waitpid(child, 0)[1])
"""
    )
    assert told == "0"


@pytest.mark.long
def test_torchs_threads_sleep_beside_a_team_that_a_busy_machine_adds_and_an_idle_one_ends():
    told = run(
        """
import time
from pathlib import Path
import torch
from octavo.kernels import native_bindings

def threads():
    return sum(1 for _ in Path("/proc/self/task").iterdir())

def reaches(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False

torch.ones(10**6).exp()
before = threads()
native_bindings.extension().assume_busy(600)
print(reaches(lambda: threads() >= before + 2))  # who keeps the team, and a team of two
native_bindings.extension().assume_busy(0)
print(reaches(lambda: threads() == before + 1))
"""
    )
    assert told.split() == ["True", "True"]


@pytest.mark.long
def test_cpu_quota_limits_threads_unless_a_number_is_set():
    told = run(
        """
import torch
from octavo.kernels import native_bindings
from octavo.kernels.threads import count_threads
import ctypes
cores = ctypes.CDLL(None).omp_get_num_procs()
native_bindings.extension().limit_threads(1)
for threads in (cores, cores + 1):
    torch.set_num_threads(threads)
    print(count_threads() - (1 if threads == cores else threads))
"""
    )
    assert told.split() == ["0", "0"]


def test_a_check_waits_for_no_work():
    check_threads()
