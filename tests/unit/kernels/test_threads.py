"""Teams of threads: whose they are, and that they are given back."""

import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from octavo.kernels import cpu
from octavo.kernels.threads import count_threads, release_threads

pytestmark = [
    pytest.mark.skipif(cpu.why_absent() is not None, reason="native: the kernels are not built"),
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


def test_a_team_ends_when_its_thread_gives_it_back_and_is_there_again_when_needed():
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
