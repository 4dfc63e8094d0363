"""Virtual environment that Triton runs in, and its creation.

The wheel of nvidia-pytriton holds Triton's server and its Python backend. Both were compiled for NumPy 1 and pass
damaged tensors with NumPy 2, so they need a separate environment:

| package                          | source                                                                          |
|----------------------------------|---------------------------------------------------------------------------------|
| Triton, its clients, NumPy 1     | pip                                                                             |
| onnxruntime                      | pip                                                                             |
| octavo, torch and all others     | the environment that octavo runs in now, by a .pth file: not installed twice,   |
|                                  | and Triton uses the octavo that created the environment                         |
| triton_python_backend_stub       | the wheel's for this version of Python, copied to the backend's folder          |

A file that records the content is written last: an environment without it is created again.
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
LEAST_GLIBC, NEWEST_PYTHON = (2, 35), (3, 13)  # supported by the wheel
MARK, LINK = "octavo-triton.json", "octavo.pth"
STUB = "triton_python_backend_stub"
SHOWN = 20  # lines of pip's output in an error
TRIAL = """
import numpy, onnxruntime, pytriton, tritonclient.grpc
import octavo.server.triton.engine_model
assert numpy.__version__.startswith("1."), numpy.__version__
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Finished environment.

    Attributes:
        folder: folder of the environment.
    """

    folder: Path

    @property
    def python(self) -> Path:
        """Python interpreter of the environment."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Folder of its packages."""
        return self.folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"

    @property
    def triton(self) -> Path:
        """Folder of the wheel with the server and its backends."""
        return self.packages / "pytriton" / "tritonserver"

    def variables(self) -> dict[str, str]:
        """Environment variables for Triton's server: this process's, with the paths of its libraries and Python."""
        libraries = [sysconfig.get_config_var("LIBDIR"), self.packages / "nvidia_pytriton.libs"]
        inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
        return inherited | {
            "PATH": f"{self.folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "VIRTUAL_ENV": str(self.folder),
        }


def make_environment(folder: Path, *, on_step: Callable[[str], None] = lambda _: None) -> Environment:
    """Create the environment unless it exists.

    Args:
        folder: a folder that is new, empty, or left unfinished by an earlier call.
        on_step: called with a description of each step before it runs.

    Raises:
        ConfigError: the wheel is not for this machine, the folder holds something else, or pip fails.
    """
    folder = folder.absolute()
    if (reason := unsupported_reason()) is not None:
        raise ConfigError(f"Triton cannot run here: {reason}; octavo serve MODEL runs without it")
    check_folder(folder, is_own=lambda path: (path / MARK).is_file())
    environment = Environment(folder=folder)
    if _read_mark(folder) == _expected_mark():
        return environment
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MARK, "{}\n")
    (environment.packages / LINK).unlink(missing_ok=True)  # pip must not see the packages it links
    on_step("a virtual environment")
    _run([sys.executable, "-m", "venv", folder])
    on_step("Triton, NumPy 1 and onnxruntime, about 90 MB")
    _run(
        [environment.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet", *PACKAGES]
    )
    on_step("octavo")
    stub = environment.triton / "backends" / "python" / STUB
    shutil.copyfile(environment.triton / "python_backend_stubs" / sysconfig.get_python_version() / STUB, stub)
    stub.chmod(0o755)
    (environment.packages / LINK).write_text(_link(), encoding="utf-8")
    _run([environment.python, "-c", TRIAL])
    write_atomically(folder / MARK, json.dumps(_expected_mark(), indent=2) + "\n")
    return environment


def find_environment(folder: Path) -> Environment:
    """Return the environment that :func:`make_environment` created.

    Raises:
        ConfigError: there is none, it is unfinished, or another octavo or Python created it.
    """
    folder = folder.absolute()
    mark = _read_mark(folder)
    if mark != _expected_mark():
        reason = "has none" if not mark else "was created by another octavo or Python"
        raise ConfigError(f"Triton needs a separate environment, and {str(folder)!r} {reason}; run octavo triton setup")
    return Environment(folder=folder)


def unsupported_reason() -> str | None:
    """Reason why the wheel does not support this machine or Python; None if it does."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return (
            f"nvidia-pytriton has wheels only for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
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


def _expected_mark() -> dict[str, object]:
    """Content that the record of a finished environment must have."""
    return {"python": sys.version.split()[0], "packages": [*PACKAGES], "link": _link()}


def _read_mark(folder: Path) -> dict[str, object]:
    """Read the record of an environment; empty if it is unfinished."""
    try:
        return read_object(folder / MARK)
    except (OSError, DataError):
        return {}


def _link() -> str:
    """Lines of a .pth file: octavo's source folder, then its packages, after those of Triton's environment."""
    source = str(Path(octavo.__file__).resolve().parents[1])
    places = [place for place in site.getsitepackages() if place != source]
    return "".join([f"{source}\n", *(f"import site; site.addsitedir({place!r})\n" for place in places)])


def _run(command: list[object]) -> None:
    """Run a command; raise ConfigError with the end of its output if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        output = "\n".join((done.stderr or done.stdout).strip().splitlines()[-SHOWN:])
        raise ConfigError(f"cannot create the environment; {command[1:3]} ended with {done.returncode}:\n{output}")
