"""The virtual environment that Triton runs in, and how it is made.

The wheel of nvidia-pytriton holds Triton's server and its Python backend. Both were compiled for NumPy 1: with NumPy 2
they hand over damaged tensors. So they have an environment of their own:

| what                             | where it comes from                                                             |
|----------------------------------|---------------------------------------------------------------------------------|
| Triton, its clients, NumPy 1     | pip                                                                             |
| onnxruntime                      | pip                                                                             |
| octavo, torch and everything else| the environment that octavo runs in now, by a .pth file: nothing is installed   |
|                                  | twice, and Triton's octavo is the one that made the environment                 |
| triton_python_backend_stub       | the wheel's for this version of Python, copied to where the backend looks       |

A file with what was made is written last: an environment without it is made again.
"""

import json
import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import octavo
from octavo.errors import ConfigError, DataError
from octavo.files import check_folder, write_atomically
from octavo.parsing import read_object

__all__ = ["PACKAGES", "Environment", "find_environment", "make_environment"]

PACKAGES = ("nvidia-pytriton==0.7.0", "numpy<2", "onnxruntime>=1.31")
LEAST_GLIBC, NEWEST_PYTHON = (2, 35), (3, 13)  # the wheel's
MARK, LINK = "octavo-triton.json", "octavo.pth"
STUB = "triton_python_backend_stub"
SHOWN = 20  # lines of what pip says
TRIAL = """
import numpy, onnxruntime, pytriton, tritonclient.grpc
import octavo.server.triton.engine_model
assert numpy.__version__.startswith("1."), numpy.__version__
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment that was made.

    Attributes:
        folder: of it.
    """

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Where its packages lie."""
        return self.folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"

    @property
    def triton(self) -> Path:
        """The wheel's folder with the server and its backends."""
        return self.packages / "pytriton" / "tritonserver"

    def variables(self) -> dict[str, str]:
        """Of the process that Triton's server is: this process's own, and where its libraries and its Python are."""
        libraries = [sysconfig.get_config_var("LIBDIR"), self.packages / "nvidia_pytriton.libs"]
        kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
        return kept | {
            "PATH": f"{self.folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "VIRTUAL_ENV": str(self.folder),
        }


def make_environment(folder: Path, *, on_step: Callable[[str], None] = lambda _: None) -> Environment:
    """Make the environment, unless it is there.

    Args:
        folder: new, empty, or one that an earlier call has begun.
        on_step: told what is being done, before it is.

    Raises:
        ConfigError: the wheel is not for this machine, the folder holds something else, or pip fails.
    """
    folder = folder.absolute()
    if (reason := unsupported_reason()) is not None:
        raise ConfigError(f"Triton cannot run here: {reason}; octavo serve MODEL needs none of it")
    check_folder(folder, is_own=lambda own: (own / MARK).is_file())
    made = Environment(folder=folder)
    if _marked(folder) == _wanted():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MARK, "{}\n")
    (made.packages / LINK).unlink(missing_ok=True)  # pip is not to see what it leads to
    on_step("a virtual environment")
    _run([sys.executable, "-m", "venv", folder])
    on_step("Triton, NumPy 1 and onnxruntime, about 90 MB")
    _run([made.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet", *PACKAGES])
    on_step("octavo")
    stub = made.triton / "backends" / "python" / STUB
    shutil.copyfile(made.triton / "python_backend_stubs" / sysconfig.get_python_version() / STUB, stub)
    stub.chmod(0o755)
    (made.packages / LINK).write_text(_link(), encoding="utf-8")
    _run([made.python, "-c", TRIAL])
    write_atomically(folder / MARK, json.dumps(_wanted(), indent=2) + "\n")
    return made


def find_environment(folder: Path) -> Environment:
    """The environment that :func:`make_environment` made there.

    Raises:
        ConfigError: there is none, it was not finished, or another octavo or Python made it.
    """
    folder = folder.absolute()
    found = _marked(folder)
    if found != _wanted():
        reason = "there is none" if not found else "it was made by another octavo or Python"
        raise ConfigError(
            f"Triton needs an environment of its own, and in {str(folder)!r} {reason}; octavo triton setup"
        )
    return Environment(folder=folder)


def unsupported_reason() -> str | None:
    """Why the wheel is not for this machine or Python; None where it is."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return (
            f"nvidia-pytriton has wheels for Linux on x86-64 alone, and this is {sys.platform} on {platform.machine()}"
        )
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split("."))) < LEAST_GLIBC:
        least = ".".join(map(str, LEAST_GLIBC))
        return f"nvidia-pytriton needs glibc {least} or newer, and this is {library or 'another library'} {version}"
    if not sys.version_info[:2] <= NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        return f"nvidia-pytriton is for Python up to {newest}, and this is {sysconfig.get_python_version()}"
    place, name = map(sysconfig.get_config_var, ("LIBDIR", "LDLIBRARY"))
    if not (name.endswith(".so") and (Path(place) / name).exists()):
        return f"Triton loads Python as a library, and there is no {place}/{name}; build Python with --enable-shared"
    return None


def _wanted() -> dict[str, object]:
    """What a finished environment was made of."""
    return {"python": sys.version.split()[0], "packages": [*PACKAGES], "link": _link()}


def _marked(folder: Path) -> dict[str, object]:
    """What the folder says that it was made of; empty where it is not finished."""
    try:
        return read_object(folder / MARK)
    except (OSError, DataError):
        return {}


def _link() -> str:
    """Lines of a .pth file: octavo's own place, and its packages behind those of Triton's environment."""
    own = str(Path(octavo.__file__).resolve().parents[1])
    places = [place for place in site.getsitepackages() if place != own]
    return "".join([f"{own}\n", *(f"import site; site.addsitedir({place!r})\n" for place in places)])


def _run(command: list[object]) -> None:
    """Raises ConfigError with the end of what a command that failed has said."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-SHOWN:])
        raise ConfigError(f"the environment cannot be made; {command[1:3]} ended with {done.returncode}:\n{said}")
