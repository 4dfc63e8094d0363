"""What a session gives its parts, and that a contestant that fails takes no other with it."""

import math
import time

import pytest
import torch

from octavo.bench.session import (
    NO_TIME,
    Contestant,
    OutOfTimeError,
    Rotation,
    hopper_session,
    rehearsal_session,
    share_out,
)
from octavo.bench.sizes import HOPPER
from octavo.errors import BackendError


def entry(run=lambda: None, work=1.0):
    return Contestant(build=lambda: run, work=work, unit="GB")


def failing(error):
    def build():
        raise error

    return Contestant(build=build, work=1.0, unit="GB")


def test_a_contestant_that_fails_is_reported_and_the_others_run(session):
    def broken():
        raise RuntimeError("at its first call\nwith more")

    found = session.compare({"a": failing(BackendError("no")), "b": entry(), "c": entry(broken)})
    assert [*found.seconds] == [*found.runs] == [*found.entered] == ["b"]
    assert len(found.seconds["b"]) == session.sizes.rounds
    reasons = {failure.name: failure.reason for failure in found.failures}
    assert reasons == {"a": "BackendError: no", "c": "RuntimeError: at its first call"}
    assert all("Traceback" in failure.trace for failure in found.failures)


def test_where_none_can_run_there_is_no_time_and_no_error(session):
    assert session.compare({"a": failing(ValueError())}).seconds == {}


def test_ctrl_c_is_not_a_contestants_failure(session):
    with pytest.raises(KeyboardInterrupt):
        session.compare({"a": failing(KeyboardInterrupt())})


def test_what_there_is_no_time_to_build_is_named(session):
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


def test_who_builds_ahead_builds_its_share_and_times_nothing(session):
    built: list[str] = []

    def noting(name, *, is_tuned=False):
        return Contestant(build=lambda: lambda: built.append(name), work=1.0, unit="GB", is_tuned=is_tuned)

    entered = {name: noting(name, is_tuned=name == "e") for name in "abcde"}
    for index in range(2):
        session.prebuilds = share_out(index, 2)
        found = session.compare(entered)
        assert not found.seconds
        assert not found.runs
    assert built == ["a", "c", "b", "d"]
