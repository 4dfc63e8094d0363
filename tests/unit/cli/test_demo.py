"""``octavo demo``: how many threads it takes, what it says about it, and that a begun demo keeps its number."""

import os

import pytest
import torch
from typer.testing import CliRunner

import octavo.cli.demo as command
from octavo.cli import thread_choice
from octavo.cli.app import app
from octavo.training.config import demo_config, load_config, save_config


class ReachedError(Exception):
    """The study would begin here."""


@pytest.fixture
def demo(monkeypatch, tmp_path, groups):
    """Call the demo on a machine of so many cores, some of them busy, up to the study: its threads and what it said."""

    def demo(*arguments, cores=2, busy=0, own=2, allowed=None, quota=None):
        taken = []

        def compare(config, out, **_):
            taken.append(config.training.threads)
            out.mkdir(exist_ok=True)
            save_config(config, out / "config.toml")
            raise ReachedError

        monkeypatch.setattr(command, "compare", compare)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed or cores)), raising=False)
        groups("0::/\n", {"cpu.max": f"{quota * 100000 if quota else 'max'} 100000\n"})
        monkeypatch.setattr(thread_choice, "busy_cores", lambda: busy)
        monkeypatch.setattr(torch, "get_num_threads", lambda: own)
        result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "run"), *arguments])
        assert isinstance(result.exception, ReachedError), result.output
        assert load_config(tmp_path / "run" / "config.toml").training.threads == taken[0]
        return taken[0], result.stderr

    return demo


def test_free_machine_uses_all_threads_silently(demo):
    assert demo() == (2, "")
    assert demo("--force", cores=64, busy=20, own=32) == (32, "")


def test_busy_core_reduces_threads_with_a_note(demo):
    assert demo(busy=1) == (1, "1 of 2 cores is busy; training with 1 thread (set --threads to change)\n")


def test_two_busy_cores_of_four(demo):
    assert demo(cores=4, busy=2, own=4) == (
        2,
        "2 of 4 cores are busy; training with 2 threads (set --threads to change)\n",
    )


def test_busy_core_reduces_threads_under_affinity(demo):
    assert demo(cores=64, allowed=2, busy=1) == (
        1,
        "1 of 2 cores is busy; training with 1 thread (set --threads to change)\n",
    )


def test_quota_limits_threads(demo):
    assert demo(cores=64, busy=10, own=64, quota=2) == (
        2,
        "2 of 64 cores are allowed; training with 2 threads (set --threads to change)\n",
    )
    assert demo("--force", cores=64, own=2, quota=2) == (2, "")


def test_no_more_threads_than_cores(demo):
    """OMP_NUM_THREADS asks for more."""
    assert demo(own=4) == (
        2,
        "torch would use 4 threads on 2 cores; training with 2 threads (set --threads to change)\n",
    )
    assert demo("--force", cores=64, allowed=1, own=4) == (
        1,
        "torch would use 4 threads on 1 core; training with 1 thread (set --threads to change)\n",
    )
    assert demo("--force", own=4, busy=1)[1].startswith("1 of 2 cores is busy; ")


def test_cores_beyond_a_quota_may_be_busy(demo):
    assert demo(cores=64, busy=63, own=64, quota=2)[0] == 1


@pytest.mark.parametrize("threads", [0, 2])
def test_given_threads_are_used(demo, threads):
    assert demo("--threads", str(threads), busy=2) == (threads, "")


def test_resumed_demo_keeps_its_threads(demo):
    assert demo(busy=1)[0] == 1
    assert demo(busy=0) == (1, "")
    assert demo("--force", busy=0) == (2, "")


def test_older_demo_keeps_its_threads(demo, tmp_path):
    (tmp_path / "run").mkdir()
    save_config(demo_config(quick=True), tmp_path / "run" / "config.toml")
    assert demo(busy=1) == (0, "")
