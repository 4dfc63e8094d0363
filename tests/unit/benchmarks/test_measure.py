"""A result says how it was made: the command line as it was given."""

import sys

from benchmarks import measure


def test_the_command_is_the_one_that_was_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "--windows", "2", "--speed", "--mix", "a file.toml"])
    measure.publish("theme", ["| a |", "[b]"], title="A title", machine="a machine", write=True)
    (path,) = tmp_path.iterdir()
    lines = path.read_text().splitlines()
    assert lines[0] == "# A title"
    assert lines[2].startswith("`python -m benchmarks.theme --windows 2 --speed --mix 'a file.toml'`, ")
    assert lines[-2:] == ["| a |", "[b]"]
    assert capsys.readouterr().out.splitlines() == ["| a |", "[b]", f"written to {path}"]


def test_publish_writes_no_file_without_write(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    measure.publish("theme", ["one"], title="t", machine="m", write=False)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == "one\n"
