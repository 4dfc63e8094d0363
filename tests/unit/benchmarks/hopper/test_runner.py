"""The parts one after the other: none ends another, each has its share of the time."""

import time

import pytest

from benchmarks.hopper import runner
from benchmarks.hopper.runner import PARTS, Part, check_parts, run
from octavo.bench.results import Report, Section
from octavo.errors import ConfigError

ONE, TWO = (Section(title=title, columns=("a",), rows=(("1",),)) for title in ("one", "two"))


def parts(monkeypatch, *measures):
    made = tuple(Part(f"part{index}", measure, 1 / len(measures)) for index, measure in enumerate(measures))
    monkeypatch.setattr(runner, "PARTS", made)


def fine(_):
    yield ONE


def test_a_part_that_raises_keeps_what_it_had_and_the_next_one_runs(monkeypatch, session):
    def breaking(_):
        yield ONE
        raise RuntimeError("CUDA error: an illegal address\nmore")

    parts(monkeypatch, breaking, fine)
    report = run(session, seconds=60)
    first, second = report.parts
    assert first.sections == [ONE]
    assert first.failure is not None
    assert first.failure.reason == "RuntimeError: CUDA error: an illegal address"
    assert second.sections == [ONE]
    assert second.failure is None


def test_a_device_that_is_lost_ends_no_report(monkeypatch, session):
    parts(monkeypatch, fine, fine)

    def lost():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(type(session), "forget", lambda _: lost())
    report = run(session, seconds=60)
    assert [part.sections for part in report.parts] == [[ONE], [ONE]]
    assert [part.failure.reason for part in report.parts] == ["RuntimeError: the device is gone"] * 2  # type: ignore[union-attr]


def test_ctrl_c_keeps_what_is_finished_and_names_the_rest(monkeypatch, session):
    def interrupted(_):
        yield ONE
        raise KeyboardInterrupt

    parts(monkeypatch, fine, interrupted, fine)
    seen: list[int] = []
    report = run(session, seconds=60, on_part=lambda so_far: seen.append(len(so_far.parts)))
    assert report.is_interrupted
    assert [len(part.sections) for part in report.parts] == [1, 1, 0]
    assert [part.failure and part.failure.reason for part in report.parts] == [
        None,
        "interrupted",
        "left out, interrupted",
    ]
    assert seen == [3], "those to come are named, should the process be ended"


def test_a_part_for_which_no_time_is_left_is_named(monkeypatch, session):
    def slow(_):
        time.sleep(0.6)
        yield ONE

    parts(monkeypatch, slow, fine)
    report = run(session, seconds=0.5)
    assert report.parts[1].sections == []
    assert report.parts[1].failure is not None
    assert report.parts[1].failure.reason == "left out, the parts before it had used the time"


def test_unused_time_of_a_part_goes_to_the_next(monkeypatch, session):
    left: list[float] = []

    def looking(own):
        left.append(own.deadline - time.monotonic())
        yield ONE

    parts(monkeypatch, looking, looking)
    run(session, seconds=100)
    assert 45 < left[0] <= 50
    assert 90 < left[1] <= 100


def test_late_part_names_the_work_it_did_not_start(monkeypatch, session):
    def late(own):
        yield ONE
        own.deadline = 0.0
        own.check_time("the rest")

    parts(monkeypatch, late)
    (part,) = run(session, seconds=60).parts
    assert part.sections == [ONE]
    assert part.failure is not None
    assert part.failure.reason == "its time was over before the rest and what follows"
    assert part.failure.trace == ""


def test_progress_names_the_part(monkeypatch, session):
    said: list[tuple[str, str]] = []

    def saying(own):
        own.on_progress("a kernel")
        yield ONE

    parts(monkeypatch, saying)
    run(session, seconds=60, on_progress=lambda part, doing: said.append((part, doing)))
    assert ("part0", "a kernel") in said


def test_the_shares_are_the_whole():
    assert sum(part.share for part in PARTS) == pytest.approx(1.0)


def test_a_choice_of_parts_has_the_card_with_it():
    assert [part.name for part in check_parts(["casts"])] == ["card", "casts"]
    assert check_parts([]) == list(PARTS)
    with pytest.raises(ConfigError, match="there is no part 'x'; use some of card, accumulation"):
        check_parts(["x"])


def test_a_rehearsal_is_called_one(monkeypatch, session):
    parts(monkeypatch, fine)
    report = run(session, seconds=60)
    assert isinstance(report, Report)
    assert report.is_rehearsal
    assert report.facts["device"] == "CPU, a rehearsal"
    assert report.command == "python -m benchmarks.hopper --rehearse --seconds 60"
