"""What the console prints of text that looks like rich's markup."""

import sys

import pytest

from octavo.cli.console import complain, print_table


def test_brackets_in_a_table_are_no_markup(capsys):
    print_table("Data: runs/[red]x", ["a[bold]", "b"], [["path/[red]y", "[/]"]])
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Data: runs/[red]x", "a[bold]", "path/[red]y", "[/]"))


def test_brackets_in_a_complaint_are_no_markup(capsys):
    complain("cannot use runs/[red]x")
    assert capsys.readouterr().err == "error: cannot use runs/[red]x\n"


@pytest.mark.parametrize("no_color", [True, False])
def test_no_color_is_honoured_on_a_terminal(capsys, monkeypatch, no_color):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    complain("steps must be 1, not 0")
    red = "\x1b[1;31m"
    assert (red in capsys.readouterr().err) is not no_color


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_takes_nothing(capsys, monkeypatch, stream):
    """Python has None in place of a stream that the shell closed."""
    monkeypatch.setattr(sys, stream, None)
    print_table("title", ("a",), [("b",)])
    complain("a sentence")
    assert ("b" in capsys.readouterr().out) == (stream == "stderr")
