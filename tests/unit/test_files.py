"""Atomic writes: the new content or the old, never half."""

import errno
import os
import secrets
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError, ConfigError
from octavo.files import (
    check_folder,
    check_may_write,
    check_room,
    claimed_folder,
    replacing,
    replacing_folder,
    write_atomically,
)


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "f.txt"
    write_atomically(path, "old ü")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_failure_keeps_the_old_file(tmp_path):
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


def test_errors_name_the_given_file(tmp_path):
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


@pytest.mark.parametrize("write", [write_atomically, lambda path, _: fill_with_a_full_disk(path)])
def test_full_disk_error_names_the_given_path(tmp_path, monkeypatch, write):
    def full(self, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the write of an open file says it: without a name

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(tmp_path / "out", b"new")
    assert caught.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def fill_with_a_full_disk(folder):
    with replacing_folder(folder) as temporary:
        (temporary / "model").write_bytes(b"new")


def is_own(folder):
    return (folder / "own").is_file()


def fill(folder, text):
    with replacing_folder(folder, is_own=is_own) as temporary:
        (temporary / "own").write_text(text)


def test_folder_is_created_and_older_result_replaced(tmp_path):
    out = tmp_path / "out"
    fill(out, "old")
    fill(out, "new")
    assert (out / "own").read_text() == "new"
    assert list(tmp_path.iterdir()) == [out]


def test_symbolic_link_is_kept(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    fill(tmp_path / "out", "old")
    fill(tmp_path / "out", "new")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "own").read_text() == "new"


def test_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="out' is taken: something else was written there in the meantime"):
        fill(tmp_path / "out", "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]


def test_a_failure_keeps_the_old_folder(tmp_path):
    fill(tmp_path / "out", "old")

    def interrupted():
        with replacing_folder(tmp_path / "out", is_own=is_own) as temporary:
            (temporary / "own").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "own"]
    assert (tmp_path / "out" / "own").read_text() == "old"


@pytest.mark.parametrize("kind", ["writing", "older"])
def test_other_hidden_folders_are_not_removed(tmp_path, monkeypatch, kind):
    """Such as of process 1 in another container, on a disk that both have."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "same")
    theirs = tmp_path / f".out.same.{kind}"
    theirs.mkdir()
    (theirs / "model").write_text("theirs")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "own").write_text("old")
    with pytest.raises(OSError, match=f"same.{kind}"):
        fill(tmp_path / "out", "new")
    assert (theirs / "model").read_text() == "theirs"
    assert (tmp_path / "out" / "own").read_text() == "old"


def test_one_of_two_threads_gets_the_folder(tmp_path):
    both = Barrier(2)

    def write(text):
        with suppress(ConfigError), replacing_folder(tmp_path / "out") as temporary:
            (temporary / "model").write_text(text)
            both.wait(10)
            return text
        return "is taken"

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(write, ("one", "two")))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "out"]
    assert (tmp_path / "out" / "model").read_text() in said


def test_concurrent_writes_of_one_file_are_atomic(tmp_path):
    both = Barrier(2)

    def write(text):
        with replacing(tmp_path / "table") as temporary:
            temporary.write_text(text)
            both.wait(10)
            assert temporary.read_text() == text

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ("one", "two")))
    assert [path.name for path in tmp_path.iterdir()] == ["table"]


def test_check_folder_accepts_missing_empty_and_own_folders(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "own", "old")
    for folder in ("new", "new/below", "empty", "own"):
        check_folder(tmp_path / folder, is_own=is_own)
    for folder, words in (("file", "is a file"), ("file/below", "is a file"), ("own", "holds other files")):
        with pytest.raises(ConfigError, match=words):
            check_folder(tmp_path / folder)


def test_unwritable_folder_is_refused_before_the_work(tmp_path, monkeypatch):
    """A folder that is renamed into its place needs the one above it."""
    (tmp_path / "shut" / "empty").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "shut" or not mode & os.W_OK)
    check_folder(tmp_path / "shut" / "empty")
    for folder in ("shut", "shut/new", "shut/new/below"):
        with pytest.raises(ConfigError, match=r"you may not write into '.*shut'"):
            check_may_write(tmp_path / folder)
    with pytest.raises(ConfigError, match="you may not write into"), claimed_folder(tmp_path / "shut" / "empty"):
        pass


def test_folders_created_for_a_failed_result_are_removed(tmp_path):
    (tmp_path / "kept").mkdir()
    with suppress(RuntimeError), claimed_folder(tmp_path / "kept" / "new" / "below"):
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
    with suppress(RuntimeError), claimed_folder(tmp_path / "kept"):
        raise RuntimeError
    assert (tmp_path / "kept").is_dir(), "it was there before"
    with claimed_folder(tmp_path / "kept" / "new" / "below"):
        (tmp_path / "kept" / "new" / "below" / "result").touch()
    assert (tmp_path / "kept" / "new" / "below" / "result").is_file()


def test_files_get_the_read_permissions_of_the_folder(tmp_path):
    """Tensors too, which safetensors writes for their owner alone; a server runs as another user."""
    before = os.umask(0o027)
    try:
        with replacing_folder(tmp_path / "out") as temporary:
            (temporary / "inner").mkdir()
            save_file({"x": torch.zeros(1)}, temporary / "inner" / "model.safetensors")
            (temporary / "run.sh").write_text("exit")
            (temporary / "run.sh").chmod(0o750)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*")}
    assert modes == {"inner": 0o750, "model.safetensors": 0o640, "run.sh": 0o750}


KILLED = """
import os, signal, sys
from pathlib import Path
from octavo.files import replacing, replacing_folder
make = replacing if sys.argv[1].endswith(".bin") else replacing_folder
with make(Path(sys.argv[1])) as temporary:
    (temporary if make is replacing else temporary / "model").write_text("half")
    print(temporary, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def writer(out, how):
    """Another process that writes the folder: killed in the middle, or still at it."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(out), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.long
@pytest.mark.parametrize("call", ["write", "claim"])
def test_hidden_folder_of_killed_process_is_removed(tmp_path, call):
    process, left = writer(tmp_path / "out", "killed")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert (left / "model").read_text() == "half"
    (tmp_path / ".other.0123456789abcdef.writing").mkdir()
    (tmp_path / ".out.notes").mkdir()
    if call == "write":
        fill(tmp_path / "out", "new")
    else:
        with claimed_folder(tmp_path / "out"):
            pass
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {"out"} == {".other.0123456789abcdef.writing", ".out.notes"}


@pytest.mark.long
def test_hidden_file_of_killed_process_is_removed(tmp_path):
    process, left = writer(tmp_path / "table.bin", "killed")
    process.communicate()
    assert left.read_text() == "half"
    (tmp_path / ".other.bin.0123456789abcdef.tmp").touch()
    (tmp_path / ".table.bin.notes").touch()
    write_atomically(tmp_path / "table.bin", "new")
    assert (tmp_path / "table.bin").read_text() == "new"
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {"table.bin"} == {".other.bin.0123456789abcdef.tmp", ".table.bin.notes"}


@pytest.mark.long
def test_hidden_file_of_running_process_is_kept(tmp_path):
    process, theirs = writer(tmp_path / "table.bin", "lives")
    write_atomically(tmp_path / "table.bin", "mine")
    assert theirs.read_text() == "half"
    assert (tmp_path / "table.bin").read_text() == "mine"
    process.communicate("")
    assert process.returncode == 0
    assert (tmp_path / "table.bin").read_text() == "half", "the later one has the name"
    assert [path.name for path in tmp_path.iterdir()] == ["table.bin"]


@pytest.mark.long
def test_hidden_folder_of_running_process_is_kept(tmp_path):
    process, theirs = writer(tmp_path / "out", "lives")
    fill(tmp_path / "out", "mine")
    assert (theirs / "model").read_text() == "half"
    assert (tmp_path / "out" / "own").read_text() == "mine"
    process.communicate("")
    assert process.returncode == 1  # it hears that the folder is taken
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_moved_aside_is_restored(tmp_path):
    """Killed between two renames: the older one is whole, the new one nobody can vouch for."""
    older = tmp_path / ".out.0123456789abcdef.older"
    older.mkdir()
    (older / "own").write_text("old")
    (tmp_path / ".out.0123456789abcdee.writing").mkdir()

    def interrupted():
        with replacing_folder(tmp_path / "out", is_own=is_own):
            assert (tmp_path / "out" / "own").read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "out" / "own").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "error",
    [
        lambda file: OSError(errno.ENOSPC, "No space left on device", str(file)),
        lambda file: OSError(f"{file}: no space"),
        lambda file: CheckpointError(f"{str(file)!r} cannot be read"),
    ],
)
def test_errors_name_the_given_folder(tmp_path, error):
    def fails():
        with replacing_folder(tmp_path / "out") as temporary:
            raise error(temporary / "model")

    with pytest.raises((OSError, CheckpointError)) as caught:
        fails()
    assert str(tmp_path / "out" / "model") in str(caught.value)
    assert "writing" not in str(caught.value)


def test_too_little_disk_space_raises_first(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path / "new" / "out", 1)
    with pytest.raises(
        ConfigError, match=r"out' has [\d,]+ MiB free, and the result takes [\d,]+ MiB; free some space"
    ):
        check_room(tmp_path / "new" / "out", 2 * free)
