"""Atomic writes: the new content or the old, never half."""

import pytest

from octavo.training.files import replacing, write_atomically


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
