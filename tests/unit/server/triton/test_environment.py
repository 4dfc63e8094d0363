"""Triton's environment without the network: a python that does nothing, and what is refused."""

import subprocess
import sys
import sysconfig

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.server.triton import environment
from octavo.server.triton.environment import Environment, find_environment, make_environment, unsupported_reason


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """What would be run; the wheel's files appear when pip is asked for them."""
    asked = []

    def run(command, **_):
        asked.append(command[1:3])
        if command[2] == "pip":
            assert not (made.packages / environment.LINK).exists(), "pip sees octavo's packages"
            stubs = made.triton / "python_backend_stubs" / sysconfig.get_python_version()
            stubs.mkdir(parents=True, exist_ok=True)
            (stubs / environment.STUB).write_text("stub")
            (made.triton / "backends" / "python").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, *answers.pop(0) if answers else (0, "", ""))

    made, answers = Environment(folder=tmp_path), list[tuple[int, str, str]]()

    def at(folder, *given):
        nonlocal made
        made, answers[:] = Environment(folder=folder), given
        return asked

    monkeypatch.setattr(environment, "unsupported_reason", lambda: None)
    monkeypatch.setattr("octavo.server.triton.environment.subprocess.run", run)
    return at


def test_environment_is_created_once(commands, tmp_path):
    folder, steps = tmp_path / "new" / "triton", list[str]()
    asked = commands(folder)
    made = make_environment(folder, on_step=steps.append)
    assert [command[1] for command in asked] == ["venv", "pip", environment.TRIAL]
    assert len(steps) == 3
    assert (made.triton / "backends" / "python" / environment.STUB).stat().st_mode & 0o111
    assert make_environment(folder) == find_environment(folder) == made
    assert len(asked) == 3, "nothing is done again"


def test_interrupted_creation_is_completed(commands, tmp_path):
    commands(tmp_path, (0, "", ""), (1, "", "no such\npackage"))
    with pytest.raises(ConfigError, match=r"ended with 1:\nno such\npackage"):
        make_environment(tmp_path)
    with pytest.raises(ConfigError, match="has none; run octavo triton setup"):
        find_environment(tmp_path)
    commands(tmp_path)
    make_environment(tmp_path)
    find_environment(tmp_path)


def test_environment_of_another_octavo_is_recreated(commands, monkeypatch, tmp_path):
    asked = commands(tmp_path)
    make_environment(tmp_path)
    monkeypatch.setattr(environment, "PACKAGES", ("nvidia-pytriton==9",))
    with pytest.raises(ConfigError, match="another octavo or Python"):
        find_environment(tmp_path)
    make_environment(tmp_path)
    assert len(asked) == 6


def test_folder_with_other_files_is_unchanged(commands, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        make_environment(tmp_path)
    assert not commands(tmp_path)


def test_linked_packages_come_after_the_environments(tmp_path):
    """As Python finds them, in an environment with a module of its own of a name that octavo's packages have too."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    made = Environment(folder=folder)
    (made.packages / "numpy.py").touch()
    (made.packages / environment.LINK).write_text(environment._link())
    names = ("octavo", "numpy", "torch")
    code = f"from importlib.util import find_spec\nfor name in {names}: print(find_spec(name).origin)"
    done = subprocess.run([made.python, "-c", code], capture_output=True, text=True, env={}, check=True)
    wanted = [octavo.__file__, str(made.packages / "numpy.py"), torch.__file__]
    assert done.stdout.splitlines() == wanted


def test_variables_set_path_and_libraries(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("PATH", "/programs")
    made = Environment(folder=tmp_path)
    found = made.variables()
    assert found["PATH"] == f"{tmp_path}/bin:/programs"
    assert "PYTHONPATH" not in found
    assert str(made.packages / "nvidia_pytriton.libs") in found["LD_LIBRARY_PATH"].split(":")


PYTHON = {"LIBDIR": "/lib", "LDLIBRARY": "libpython.a"}


@pytest.mark.skipif(environment.unsupported_reason() is not None, reason="this machine is refused anyway")
@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("sys.platform", "darwin", "wheels only for Linux on x86-64, and this is darwin"),
        ("platform.machine", lambda: "aarch64", "on aarch64"),
        ("platform.libc_ver", lambda: ("glibc", "2.31"), "glibc 2.35 or newer, and this is glibc 2.31"),
        ("platform.libc_ver", lambda: ("", ""), "another library"),
        ("NEWEST_PYTHON", (3, 10), "Python up to 3.10"),
        ("sysconfig.get_config_var", PYTHON.get, "there is no /lib/libpython.a"),
    ],
    ids=["system", "machine", "old", "musl", "python", "static"],
)
def test_unsupported_machines_have_a_reason(monkeypatch, tmp_path, place, value, says):
    monkeypatch.setattr(f"octavo.server.triton.environment.{place}", value)
    assert says in str(unsupported_reason())
    with pytest.raises(ConfigError, match="octavo serve MODEL runs without it"):
        make_environment(tmp_path)
