"""What progress looks like where there is no terminal, and on one."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from octavo.cli import progress
from octavo.cli.progress import LiveDisplay, PlainDisplay, open_display, phases


def test_plain_progress_prints_a_line_a_tenth_and_not_more(monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    out = io.StringIO()
    display = PlainDisplay(Console(file=out))
    advance = display.phase("train fp32", 1000)
    for step in range(1, 1001):
        advance(step, f"loss {step}")
    display.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "train fp32 ..."
    assert [line.split(":")[1].split("%")[0].strip() for line in lines[1:-1]] == [str(10 * n) for n in range(1, 10)]
    assert all("s left, loss" in line for line in lines[1:-1])
    assert lines[-1].startswith("train fp32: done in ")


def test_a_phase_without_total_prints_begin_and_end_only():
    out = io.StringIO()
    display = PlainDisplay(Console(file=out))
    advance = display.phase("tokenizer", None)
    advance(3)
    display.close()
    assert len(out.getvalue().splitlines()) == 2


def test_the_next_phase_completes_the_live_bar_before_it():
    bars = Progress(console=Console(file=io.StringIO()))
    display = LiveDisplay(bars)
    display.phase("one", 10)(4, "note")
    display.phase("two", None)
    display.close()
    assert [task.finished for task in bars.tasks] == [True, True]


def test_brackets_in_a_live_bar_are_no_markup(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "stderr", lambda: Console(file=out, force_terminal=True, width=160))
    with open_display() as display:
        display.phase("read a[red]b", 10)(4, "in c[bold]d")
    assert "read a[red]b" in out.getvalue()
    assert "in c[bold]d" in out.getvalue()


def test_short_phase_prints_begin_and_end_only():
    out = io.StringIO()
    display = PlainDisplay(Console(file=out))
    display.phase("quick", 10)(9)
    display.close()
    assert len(out.getvalue().splitlines()) == 2


def test_a_new_name_opens_a_new_phase(capsys):
    with open_display() as display:
        show = phases(display)
        for name, done in (("one", 1), ("one", 2), ("two", 0)):
            show(name, done, 2)
    assert capsys.readouterr().err.count("...") == 2


def test_progress_goes_to_stderr_alone(capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    with open_display() as display:
        display.phase("work", 2)(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "work: 50%" in captured.err


@pytest.mark.parametrize("begun", [0, 200])
def test_the_time_left_is_that_of_the_steps_of_this_call(monkeypatch, begun):
    """A step takes 3 s; of 400, a resumed run finds the first 200 done."""
    clock = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock))
    out = io.StringIO()
    advance = PlainDisplay(Console(file=out)).phase("train fp32", 400)
    for step in range(begun + 1, 321):
        clock += 3.0
        advance(step)
    assert "train fp32: 80%, about 240 s left" in out.getvalue().splitlines()
