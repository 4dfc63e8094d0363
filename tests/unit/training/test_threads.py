"""Threads: the free cores, at least one, and the number of before after a block."""

import os
import time

import pytest
import torch

from octavo.training import threads
from octavo.training.threads import busy_cores, free_threads, using_threads


@pytest.mark.parametrize(
    ("cores", "busy", "most", "found"),
    [(2, 0, 2, 2), (2, 1, 2, 1), (2, 2, 2, 1), (2, 9, 2, 1), (64, 10, 32, 32), (64, 40, 32, 24), (2, 0, 1, 1)],
)
def test_free_threads_have_a_core_each(cores, busy, most, found):
    assert free_threads(cores=cores, busy=busy, most=most) == found


# Of the 4 cores that the process may use, and 200 ticks: user, nice, system, idle, iowait, irq, softirq, steal.
@pytest.mark.parametrize(
    ("ticks", "busy"),
    [
        ((0, 0, 0, 200, 0, 0, 0, 0), 0),
        ((0, 0, 0, 100, 100, 0, 0, 0), 0),
        ((50, 0, 0, 150, 0, 0, 0, 0), 1),
        ((40, 5, 5, 150, 0, 0, 0, 0), 1),
        ((0, 0, 0, 100, 0, 25, 25, 50), 2),
        ((20, 0, 0, 180, 0, 0, 0, 0), 0),
        ((200, 0, 0, 0, 0, 0, 0, 0), 4),
        ((0, 0, 0, 0, 0, 0, 0, 0), 0),
    ],
)
def test_busy_cores_are_the_share_of_ticks_that_were_not_idle(monkeypatch, tmp_path, ticks, busy):
    stat = tmp_path / "stat"
    start = (1000, 10, 500, 90000, 70, 3, 4, 5)

    def at(now: tuple[int, ...]) -> str:
        others = "".join(f"cpu{core} 0 0 0 0 0 0 0 0 0 0\n" for core in (1, 4, 6))
        return (
            f"cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 {' '.join(map(str, now))} 0 0\n{others}cpu9 1 1 1 1 1 1 1 1 1 1\nctxt 7\n"
        )

    stat.write_text(at(start))
    later = tuple(old + new for old, new in zip(start, ticks, strict=True))
    monkeypatch.setattr(threads, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 6}, raising=False)
    monkeypatch.setattr(time, "sleep", lambda _: stat.write_text(at(later)))
    assert busy_cores() == busy


def test_busy_cores_of_this_machine_are_in_range():
    assert 0 <= busy_cores() <= (os.cpu_count() or 1)


def test_busy_cores_are_zero_if_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "STAT", tmp_path / "missing")
    assert busy_cores() == 0


@pytest.mark.parametrize(("count", "inside"), [(1, 1), (3, 3), (0, 2)])
def test_number_of_threads_is_restored(count, inside):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with using_threads(count):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
