"""Pins on standard input, the same pins with SHA-256 hashes on standard output.

A hash is of one file, and a version has a file for each machine and Python. pip is asked, without installing anything,
which file it would take on each of ``TARGETS``; what a version has no wheel for there is named on standard error.

    python scripts/lock_hashes.py <pins >requirements
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.11", "3.12", "3.13")
GLIBC = range(5, 40)  # 2.5, as in manylinux1, to the 2.39 of 2024
TARGETS = [(machine, python) for machine in MACHINES for python in PYTHONS]
MISSING = re.compile(r"No matching distribution found for (\S+)")


def hashes(pins: list[str], *options: str) -> dict[str, set[str]]:
    """Each pin → hashes of the files that pip would take, with these options; without the pins it has no file for."""
    with tempfile.TemporaryDirectory() as folder:
        report, wanted = Path(folder) / "report.json", Path(folder) / "pins"
        wanted.write_text("\n".join(pins))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run"]
        pip += ["--ignore-installed", "--no-deps", "--report", str(report), "--requirement", str(wanted), *options]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if missing := MISSING.search(done.stderr):
            print(f"no file of {missing[1]} for {' '.join(options[-3:])}", file=sys.stderr)
            return hashes([pin for pin in pins if pin != missing[1]], *options)
        if done.returncode:
            sys.exit(done.stderr)
        taken = json.loads(report.read_text())["install"]
    names = {canonical(pin.partition("==")[0]): pin for pin in pins}
    found = defaultdict[str, set[str]](set)
    for item in taken:
        found[names[canonical(item["metadata"]["name"])]].add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def canonical(name: str) -> str:
    """A project's name as the index has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Ask for every target, and for this machine, which may build what has no wheel."""
    pins = [line.strip() for line in sys.stdin if line.strip()]
    found = hashes(pins)
    for machine, python in TARGETS:
        platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
        platforms += [
            f"--platform={old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")
        ]
        with tempfile.TemporaryDirectory() as unused:
            options = ["--only-binary=:all:", f"--target={unused}", *platforms, f"--python-version={python}"]
            for pin, more in hashes(pins, *options, "--implementation=cp").items():
                found[pin] |= more
    for pin in pins:
        print(" \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(found[pin]))]))


if __name__ == "__main__":
    main()
