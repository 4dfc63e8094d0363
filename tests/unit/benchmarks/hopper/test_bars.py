"""Every bar a part owes is in its report, whatever failed, and counts once."""

import gc
import time
import weakref
from dataclasses import replace

import pytest
import torch

from benchmarks.hopper import runner
from benchmarks.hopper.bars import judged_by_memory, judged_by_speed
from benchmarks.hopper.parts import linears
from benchmarks.hopper.runner import PARTS, run
from benchmarks.hopper.session import NO_TIME, OutOfTimeError, Session, Timings, Variant
from benchmarks.hopper.sizes import HOPPER
from benchmarks.hopper.steps import Memory
from octavo.bench.render import markdown
from octavo.bench.results import Failure, Verdict

BAR = Verdict(claim="c", bar=1.5)


def made_up(seconds, failures=()):
    variants = {name: Variant(build=lambda: list, work=1.0, unit="TFLOP") for name in seconds}
    return Timings(variants, {}, {name: [found] * 3 for name, found in seconds.items()}, failures)


def claims(report):
    return sorted(verdict.claim for verdict in report.verdicts)


def test_hopper_owes_as_many_bars_as_its_issue_names(session):
    """Counted by hand, from the tables."""
    session.sizes = HOPPER
    owed = {part.name: part.bars(session) for part in PARTS}
    one_scale, groups, ways, bf16_only = 6, 3, 3, 3
    assert {name: len(bars) for name, bars in owed.items()} == {
        "card": 0,
        "accumulation": 0,
        # fp16 is not cast both ways or of the transpose; two dtypes are made of four kinds of codes
        "casts": 2 * (one_scale + groups * ways) + bf16_only + one_scale + groups + 2 * 4,
        "linears": 3 + 3 + 3 + 3 + 3,  # the fastest and blockwise, eager and as CUDA graphs; the fastest compiled
        "layer": 2 + 2 + 1,  # bf16, torchao's, memory
        "training": 1,
        "experts": 2 + 2,  # scales a row and a block, few tokens and many
        "gemms": 0,
    }
    every = [(name, bar.claim) for name, bars in owed.items() for bar in bars]
    assert len(set(every)) == len(every)
    assert not any(bar.is_judged for bars in owed.values() for bar in bars)


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_parts_sections_judge_what_it_owes(part, session):
    session.speeds["copy"] = 1.0
    given = [verdict for section in part.measure(session) for verdict in section.verdicts]
    blank = [replace(each, found=None, by="", reason="") for each in given]
    assert sorted(blank, key=str) == sorted(part.bars(session), key=str)
    assert all(verdict.is_judged or verdict.reason for verdict in given)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_failed_or_late_variants_leave_their_bars_unjudged_with_the_reason(part, session, monkeypatch):
    owed = sorted(bar.claim for bar in part.bars(session))
    reasons = {"failed": "OutOfMemoryError: no memory", "late": NO_TIME}
    for how, reason in reasons.items():

        def compare(_, variants, how=how, reason=reason, **__):
            return Timings({}, {}, {}, tuple(Failure(name=name, reason=reason) for name in variants))

        monkeypatch.setattr(Session, "compare", compare)
        verdicts = [verdict for section in part.measure(session) for verdict in section.verdicts]
        assert sorted(verdict.claim for verdict in verdicts) == owed
        assert all(reason in verdict.reason and not verdict.is_judged for verdict in verdicts)


def test_without_a_layer_the_linears_bars_are_not_judged(session, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(linears, "Linear", broken)
    report = run(session, seconds=60, only=["linears"])
    assert report.tally == "0 of 5 bars met, 5 not judged"
    assert "0 of 5 bars met, 5 not judged." in markdown(report)
    (line, *_) = (str(verdict) for verdict in report.verdicts)
    assert line.startswith(
        "not judged: linear 32³, eager, × bf16, the fastest recipe (at least 1.25): tensorwise, eager,"
    )
    assert line.endswith("mxfp8, eager: RuntimeError: no such kernel")


def test_a_part_that_ends_early_owes_the_rest(session, monkeypatch):
    (part,) = (part for part in PARTS if part.name == "linears")

    def late(own):
        yield next(iter(part.measure(own)))
        raise OutOfTimeError("its time was over before the rest and what follows")

    monkeypatch.setattr(runner, "PARTS", (replace(part, measure=late),))
    report = run(session, seconds=60)
    assert claims(report) == sorted(bar.claim for bar in part.bars(session))
    assert [verdict.reason for verdict in report.verdicts if not verdict.is_judged] == [
        "its time was over before the rest and what follows"
    ] * 4


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_a_part_that_raises_or_is_left_out_owes_everything(session, monkeypatch, error):
    def lost(_):
        yield from ()
        raise error

    parts = [replace(part, measure=lost) for part in PARTS]
    monkeypatch.setattr(runner, "PARTS", tuple(parts))
    seen = []
    report = run(session, seconds=60, on_part=lambda so_far: seen.append(claims(so_far)))
    assert claims(report) == sorted(bar.claim for part in PARTS for bar in part.bars(session))
    assert report.tally.startswith("0 of")
    assert all(verdict.reason for verdict in report.verdicts)
    assert all(each == claims(report) for each in seen)


def test_parts_the_time_does_not_reach_owe_everything(session, monkeypatch):
    def slow(_):
        time.sleep(0.3)
        return iter(())

    first, second = (part for part in PARTS if part.name in {"layer", "training"})
    monkeypatch.setattr(runner, "PARTS", (replace(first, measure=slow), second))
    report = run(session, seconds=0.2)
    assert claims(report) == sorted(bar.claim for part in (first, second) for bar in part.bars(session))
    assert report.verdicts[-1].reason == "left out, the parts before it had used the time"
    assert report.verdicts[0].reason == runner.NOT_MADE


def test_a_speed_is_judged_by_the_fastest_on_either_side():
    found = made_up({"a": 2.0, "b": 1.0, "x": 3.0, "y": 2.0})
    verdict = judged_by_speed(BAR, found, ["a", "b", "c"], ["x", "y", "z"])
    assert (verdict.found, verdict.by, verdict.word) == (2.0, "b over y", "met")


@pytest.mark.parametrize(
    ("ours", "bases", "reason"),
    [
        (["a", "b"], ["x"], "x: no memory"),
        (["b", "c"], ["a"], "b: no time; c: it was not timed"),
    ],
)
def test_a_speed_without_both_sides_is_not_judged(ours, bases, reason):
    failures = (Failure(name="b", reason="no time"), Failure(name="x", reason="no memory"))
    verdict = judged_by_speed(BAR, made_up({"a": 1.0}, failures), ours, bases)
    assert (verdict.word, verdict.is_met, verdict.reason) == ("not judged", False, reason)


def test_memory_bar_uses_the_smallest_variant_and_needs_a_measurement():
    bar = replace(BAR, bar=0.75, at_most=True)
    judged = judged_by_memory(bar, {"base": 100, "a": 80, "b": 70}, ["a", "b", "c"], "base", ())
    assert (judged.found, judged.by, judged.word) == (0.7, "b over base", "met")
    assert judged_by_memory(bar, {"base": 0, "a": 0}, ["a"], "base", ()).reason == "memory is not measured here"
    failed = (Failure(name="base", reason="no memory"),)
    assert judged_by_memory(bar, {"a": 1}, ["a"], "base", failed).reason == "base: no memory"
    assert judged_by_memory(bar, {"base": 1}, ["a"], "base", ()).reason == "a: it was not timed"


@pytest.mark.long
@pytest.mark.parametrize("name", ["layer", "training"])
def test_memory_that_cannot_be_measured_of_one_is_of_the_others(name, session, monkeypatch):
    """Times stay, and the other variants' memory."""
    (part,) = (part for part in PARTS if part.name == name)
    looked: list[int] = []

    def fourth_fails(*_):
        looked.append(1)
        if len(looked) == 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return 10 if name == "training" else Memory(10, 5)

    if name == "training":
        monkeypatch.setattr(Session, "peak_above", fourth_fails)
    else:
        monkeypatch.setattr("benchmarks.hopper.parts.layer.memory_of", fourth_fails)
    sections = list(part.measure(session))
    assert [failure.reason for section in sections[-1:] for failure in section.failures] == [
        "OutOfMemoryError: CUDA out of memory"
    ]
    assert len(looked) == len(sections[0].rows)
    assert sections[-1].verdicts[0].found == 1.0


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_runs_of_one_table_are_freed_before_the_next_is_built(part, session, monkeypatch):
    held: list[weakref.ref[object]] = []
    alive: list[object] = []
    compare = Session.compare

    def looking(self, variants, **options):
        gc.collect()
        alive.extend(name for ref in held if (name := ref()) is not None)
        found = compare(self, variants, **options)
        held.extend(weakref.ref(run) for run in found.runs.values())
        return found

    monkeypatch.setattr(Session, "compare", looking)
    list(part.measure(session))
    assert alive == []
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []
