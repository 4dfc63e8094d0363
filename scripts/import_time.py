"""How long ``import octavo`` takes beyond ``import torch``: medians of fresh, interleaved processes.

    python scripts/import_time.py [rounds]

Every reading starts a process, because a second import in the same one costs nothing; the three kinds alternate,
because the machine's load drifts. "nothing" is an interpreter that imports neither, so that the start of Python itself
can be told apart. The bar is torch + 0.3 s.
"""

import statistics
import subprocess
import sys
import time

STATEMENTS = {"nothing": "pass", "torch": "import torch", "octavo": "import octavo"}
BAR_S = 0.3


def seconds(statement: str) -> float:
    """Wall time of a fresh interpreter that runs ``statement``."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> int:
    """Print the three medians and the difference; exit 1 where the bar is missed."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    for statement in STATEMENTS.values():
        seconds(statement)  # fill the disk cache and write the bytecode
    readings = [{name: seconds(statement) for name, statement in STATEMENTS.items()} for _ in range(rounds)]
    median = {name: statistics.median(reading[name] for reading in readings) for name in STATEMENTS}
    for name, value in median.items():
        print(f"{name:8} {value:6.3f} s")
    added = median["octavo"] - median["torch"]
    print(f"octavo adds {added:+.3f} s to torch (bar: {BAR_S:+.3f} s; {rounds} rounds)")
    return 0 if added <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
