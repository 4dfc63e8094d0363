"""What a session gives its parts, and that a variant that fails takes no other with it."""

import gc
import json
import math
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks.hopper import session as bench_session
from benchmarks.hopper.session import (
    NO_TIME,
    OutOfTimeError,
    Rotation,
    Variant,
    failure_of,
    hopper_session,
    rehearsal_session,
    share_out,
)
from benchmarks.hopper.sizes import HOPPER
from benchmarks.hopper.tables import section_of
from octavo.errors import BackendError
from tests.unit.benchmarks.hopper.conftest import freezing_session


def entry(run=lambda: None, work=1.0):
    return Variant(build=lambda: run, work=work, unit="GB")


def failing(error):
    def build():
        raise error

    return Variant(build=build, work=1.0, unit="GB")


def test_a_contestant_that_fails_is_reported_and_the_others_run(session):
    def broken():
        raise RuntimeError("at its first call\nwith more")

    found = session.compare({"a": failing(BackendError("no")), "b": entry(), "c": entry(broken)})
    assert [*found.seconds] == [*found.runs] == [*found.variants] == ["b"]
    assert len(found.seconds["b"]) == session.sizes.rounds
    reasons = {failure.name: failure.reason for failure in found.failures}
    assert reasons == {"a": "BackendError: no", "c": "RuntimeError: at its first call"}
    assert all("Traceback" in failure.trace for failure in found.failures)


class Breaking:
    """Runs so many times, then fails; as memory, it can be looked for."""

    def __init__(self, after, error=None):
        self.itself = self  # a cycle, as modules and compiled functions lie in
        self.left, self.error = after, error or torch.cuda.OutOfMemoryError("CUDA out of memory\nTried to allocate")

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise self.error


# built, measured, warmed up, then one call a round
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5], ids=["measured", "warmed up", "round 1", "round 2", "round 3"])
@pytest.mark.parametrize("kernels", [False, True])
def test_a_contestant_that_fails_while_it_is_timed_drops_out_alone(session, after, kernels):
    found = session.compare({"a": entry(), "b": entry(Breaking(after)), "c": entry()}, kernels=kernels)
    assert [*found.seconds] == [*found.runs] == [*found.variants] == ["a", "c"]
    assert [len(times) for times in found.seconds.values()] == [session.sizes.rounds] * 2
    assert all(math.isfinite(second) for times in found.seconds.values() for second in times)
    (failure,) = found.failures
    assert (failure.name, failure.reason) == ("b", "OutOfMemoryError: CUDA out of memory")
    assert "Traceback" in failure.trace


def test_where_the_base_fails_in_a_round_the_others_keep_their_times(session):
    session.clocks = (lambda run: run() or 1.0,) * 2
    section = section_of("T", session.compare({"base": entry(Breaking(4)), "b": entry()}), base="base")
    assert section.rows == (("b", "1,000.00 ms", "1.0 GB/s", "–"),)
    assert [failure.name for failure in section.failures] == ["base"]


def test_error_raised_while_timing_is_the_failure_of_its_variant(session):
    """As a GPU's errors are."""

    def clock(run):
        run()
        if lost.pop():
            raise RuntimeError("CUDA error")
        return 1.0

    lost = [False] * 20
    lost[-4] = True  # both are measured, then timed: b's first round
    session.clocks = (clock, clock)
    found = session.compare({"a": entry(), "b": entry()})
    assert found.seconds == {"a": [1.0] * session.sizes.rounds}
    assert [(failure.name, failure.reason) for failure in found.failures] == [("b", "RuntimeError: CUDA error")]


@pytest.mark.long
@pytest.mark.parametrize("after", [0, 1, 4])
def test_failed_variant_frees_its_memory_before_the_next_runs(after):
    """Also what was frozen when it failed; and in the end nothing is."""
    held, alive = [], []

    def build():
        run = Breaking(after)
        held.append(weakref.ref(run))
        return run

    def look():
        alive.append(held[0]() is not None)

    variants = {"a": Variant(build=build, work=1.0, unit="GB"), "b": entry(look)}
    assert [*freezing_session().compare(variants).seconds] == ["b"]
    assert alive == [True] * after + [False] * (6 - after)  # b is built, measured, warmed up and timed three times
    assert gc.get_freeze_count() == 0


@pytest.mark.long
def test_timed_run_is_freed_with_its_timings():
    run = Breaking(9)
    found, held = freezing_session().compare({"a": entry(run)}), weakref.ref(run)
    assert [*found.seconds] == ["a"]
    del run, found
    gc.collect()
    assert held() is None


@pytest.mark.long
def test_look_at_each_continues_after_a_failure(session):
    found, failures = session.look_at_each({"a": 0, "b": 2}, lambda n: 4 // n)
    assert found == {"b": 2}
    assert [(failure.name, failure.reason) for failure in failures] == [
        ("a", "ZeroDivisionError: integer division or modulo by zero")
    ]


def test_ctrl_c_in_a_round_is_no_failure_either(session):
    with pytest.raises(KeyboardInterrupt):
        session.compare({"a": entry(Breaking(3, KeyboardInterrupt()))})


def test_comparison_of_failing_variants_has_no_times_and_no_error(session):
    assert session.compare({"a": failing(ValueError())}).seconds == {}


def test_ctrl_c_is_not_a_variants_failure(session):
    with pytest.raises(KeyboardInterrupt):
        session.compare({"a": failing(KeyboardInterrupt())})


def test_variant_without_time_to_build_is_reported_as_a_failure(session):
    session.deadline = time.monotonic() - 1
    found = session.compare({"a": entry()})
    assert [(failure.name, failure.reason) for failure in found.failures] == [("a", NO_TIME)]
    with pytest.raises(OutOfTimeError, match="its time was over before the next"):
        session.check_time("the next")
    session.deadline = math.inf
    session.check_time("the next")


def test_times_are_those_of_one_call(session):
    from dataclasses import replace

    session.sizes = replace(session.sizes, aim=4.0)
    calls: list[int] = []

    def clock(run):
        before = len(calls)
        run()
        return float(len(calls) - before)  # a call takes a second

    session.clocks = (clock, clock)
    found = session.compare({"a": entry(lambda: calls.append(1))})
    assert found.seconds["a"] == [1.0] * session.sizes.rounds
    assert len(calls) == 1 + 1 + 4 * (1 + session.sizes.rounds)  # built, measured once, four a round


def test_kernels_have_a_clock_of_their_own(session):
    session.clocks = (lambda _: 1.0, lambda _: 2.0)
    assert set(session.compare({"a": entry()}).seconds["a"]) == {1.0}
    assert set(session.compare({"a": entry()}, kernels=True).seconds["a"]) == {2.0}


def test_a_rotation_comes_round():
    rotation = Rotation([1, 2, 3])
    assert [rotation() for _ in range(4)] == [2, 3, 1, 2]


def test_inputs_outgrow_the_cache(session):
    assert len(session.rotation(object, 1 << 20).items) == 4


def test_a_rehearsal_traces_what_would_be_compiled():
    session = rehearsal_session()
    traced = []

    def double(x):
        traced.append(torch.compiler.is_compiling())
        return 2 * x

    assert session.compiled(double)(torch.ones(1)).item() == 2.0
    assert traced == [True]


def test_a_rehearsal_knows_no_graph_and_no_memory(session):
    ran: list[int] = []
    assert session.graphed(ran.clear) == ran.clear
    assert session.peak_above(0, lambda: ran.append(1)) == session.allocated() == 0
    assert ran == [1]


def test_a_graph_holds_what_it_reads(session, monkeypatch):
    """Stand-ins for CUDA's: a graph's own memory is what is made while it is captured."""
    graph = SimpleNamespace(replay=lambda: done.append("replay"))
    done: list[str] = []
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, made in (("Stream", stream), ("current_stream", stream), ("CUDAGraph", graph)):
        monkeypatch.setattr(torch.cuda, name, lambda made=made: made)
    monkeypatch.setattr(bench_session, "_side_stream", lambda: stream)
    session.device = torch.device("cuda")
    given = torch.ones(3)
    alive = weakref.ref(given)
    replay = session.graphed(lambda given=given: done.append("run"))
    del given
    gc.collect()
    assert alive() is not None
    replay()
    assert done == ["run"] * 4 + ["replay"]
    session.prebuilds = share_out(0, 1)
    assert session.graphed(done.clear) == done.clear


def test_a_peak_is_what_a_call_adds_to_the_rest(session, monkeypatch):
    session.device = torch.device("cuda")
    done: list[str] = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 100 * 3 ** (len(done) - 2))
    assert session.peak_above(100, lambda: done.append("run")) == 800
    assert done == ["synchronize", "reset_peak_memory_stats", "run", "synchronize"]


def test_without_a_gpu_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="torch sees no CUDA device; try --rehearse"):
        hopper_session()


def test_another_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(BackendError, match=r"NVIDIA A100 has 8\.0"):
        hopper_session()


def test_a_hopper_gpu_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    session = hopper_session()
    assert session.on_gpu
    assert session.sizes is HOPPER
    assert session.clocks[1].cycles > 0 == session.clocks[0].cycles  # type: ignore[attr-defined]


def test_prebuilding_process_builds_its_share_and_times_nothing(session):
    built: list[str] = []

    def noting(name):
        return Variant(build=lambda: lambda: built.append(name), work=1.0, unit="GB")

    variants = {name: noting(name) for name in "abcd"}
    for index in range(2):
        session.prebuilds = share_out(index, 2)
        found = session.compare(variants)
        assert not found.seconds
        assert not found.runs
    assert built == ["a", "c", "b", "d"]


def test_a_failure_keeps_no_folder_of_the_machine():
    try:
        raise ImportError(f"cannot import x ({__file__})\nand more")
    except ImportError as error:
        failure = failure_of("cast", error)
    assert failure.reason == "ImportError: cannot import x (test_session.py)"
    assert 'File "test_session.py"' in failure.trace
    assert "/unit/" not in json.dumps(failure.trace)
