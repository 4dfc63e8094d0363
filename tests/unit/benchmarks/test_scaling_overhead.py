"""What the benchmark of many ranks counts, and what it refuses before it measures."""

import sys

import pytest

from benchmarks import scaling_overhead
from benchmarks.scaling_overhead import _Clock, training


def test_one_round_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling_overhead", "--rounds", "1"])
    monkeypatch.setattr(scaling_overhead, "measured_on", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        scaling_overhead.main()
    assert ended.value.code == 2
    assert "--rounds must be at least 2" in capsys.readouterr().err


def test_a_collective_within_a_reduction_counts_once(monkeypatch):
    ticks = iter([1.0, 4.0, 10.0, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    clock, found = _Clock(), list[float]()
    collective = clock.timing(lambda: None)
    reduction = clock.timing(collective)
    clock.note(reduction, found)
    clock.note(collective, found)
    clock.note(lambda: None, found)
    assert found == [3.0, 1.0, 0.0]


def test_the_worst_share_is_judged():
    steps = {"DDP, bf16": [1.0, 1.0, 1.0], "DDP, delayed": [2.0, 2.0, 2.0], "FSDP2, bf16": [1.0] * 3}
    extra = {"DDP, bf16": [0.0] * 3, "DDP, delayed": [0.1, 0.1, 0.1], "FSDP2, bf16": [0.0] * 3}
    lines = "\n".join(training({"steps": steps, "extra": extra}))
    assert "at most 5.00% of a step: missed (at most 2%)" in lines
    assert "| DDP, delayed | 2.00 (2.00–2.00) | 5.00% |" in lines
