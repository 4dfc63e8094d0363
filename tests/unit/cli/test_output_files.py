"""Which files are refused before a command computes anything."""

import os

import pytest

from octavo.cli.output_files import check_target
from octavo.errors import ConfigError


def test_writable_file_is_accepted(tmp_path, monkeypatch):
    (tmp_path / "old.html").write_text("old")
    check_target("--html", tmp_path / "old.html")
    monkeypatch.chdir(tmp_path)
    check_target("--html", tmp_path.relative_to(tmp_path) / "new.html")


@pytest.mark.parametrize(("name", "words"), [(".", "is a folder"), ("no/page.html", "create it first")])
def test_a_file_that_cannot_be_written_is_refused(tmp_path, name, words):
    with pytest.raises(ConfigError, match=f"--html: .*{words}"):
        check_target("--html", tmp_path / name)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    with pytest.raises(ConfigError, match="you may not write into"):
        check_target("--html", tmp_path / "page.html")
