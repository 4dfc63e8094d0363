"""Threads: the free cores, at least one, and the number of before after a block."""

import os

import pytest
import torch

from octavo.training.threads import busy_cores, free_threads, using_threads


@pytest.mark.parametrize(
    ("cores", "busy", "most", "threads"),
    [(2, 0, 2, 2), (2, 1, 2, 1), (2, 2, 2, 1), (2, 9, 2, 1), (64, 10, 32, 32), (64, 40, 32, 24), (2, 0, 1, 1)],
)
def test_every_thread_finds_a_core(cores, busy, most, threads):
    assert free_threads(cores=cores, busy=busy, most=most) == threads


@pytest.mark.parametrize(("load", "busy"), [(0.0, 0), (0.4, 0), (0.6, 1), (1.49, 1), (1.6, 2), (50.0, 4)])
def test_busy_cores_are_the_rounded_load(monkeypatch, load, busy):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    assert busy_cores() == busy


def test_no_core_is_called_busy_where_the_load_is_not_told(monkeypatch):
    def refuse():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", refuse)
    assert busy_cores() == 0


@pytest.mark.parametrize(("count", "inside"), [(1, 1), (3, 3), (0, 2)])
def test_the_number_of_before_comes_back(count, inside):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with using_threads(count):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
