"""Atomic writes: the new content or the old, never half."""

import os
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.files import claimed_folder, replacing, replacing_folder, write_atomically


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "f.txt"
    write_atomically(path, "old ü")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_keeps_the_old_and_leaves_nothing(tmp_path):
    path = tmp_path / "f.txt"
    write_atomically(path, "old")

    def interrupted():
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_synced_before_its_rename_and_the_folder_after(tmp_path, monkeypatch):
    path, synced = tmp_path / "f.txt", []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((str(Path(f"/proc/self/fd/{fd}").readlink()), path.exists()))
    )
    write_atomically(path, "new")
    (file, there_before), folder = synced
    assert file.endswith(".tmp")
    assert not there_before
    assert folder == (str(tmp_path), True)


def test_a_refusal_names_the_file_that_was_given(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for target in (tmp_path / "no" / "table.bin", tmp_path / "file" / "table.bin"):
        with pytest.raises(OSError, match=r"/table\.bin") as caught:
            write_atomically(target, "new")
        assert caught.value.filename == str(target)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path / "folder", "new")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "folder"), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_is_whole_or_not_there(tmp_path):
    with replacing_folder(tmp_path / "deep" / "a") as temporary:
        (temporary / "f").write_text("x")
        assert not (tmp_path / "deep" / "a").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a"]

    def interrupted():
        with replacing_folder(tmp_path / "b") as temporary:
            (temporary / "f").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_a_claimed_folder_is_new_or_empty_and_gone_if_nothing_came(tmp_path):
    with claimed_folder(tmp_path / "a"):
        assert (tmp_path / "a").is_dir()
    assert not (tmp_path / "a").exists()
    (tmp_path / "f").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("", "f", "link"):
        with pytest.raises(ConfigError, match="is not empty"), claimed_folder(tmp_path / name):
            pass
