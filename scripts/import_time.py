"""Time of ``import octavo`` after ``import torch``: medians over fresh processes.

    python scripts/import_time.py [rounds]

Every reading is a new interpreter, because a second import costs nothing. It imports torch, then octavo, and times
each: the two readings of one process are a pair, so that a busy machine, on which torch's two seconds drift by more
than the bar, does not drown the difference. What octavo makes torch load on top counts as octavo's. The bar is 0.3 s.
"""

import statistics
import subprocess
import sys

PROBE = """
import time
start = time.perf_counter()
import torch
torch_done = time.perf_counter()
import octavo
print(torch_done - start, time.perf_counter() - torch_done)
"""
BAR_S = 0.3


def reading() -> tuple[float, float]:
    """Seconds that torch takes in a fresh interpreter, and octavo after it."""
    done = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    torch_s, octavo_s = map(float, done.stdout.split())
    return torch_s, octavo_s


def main() -> int:
    """Print the medians; exit with code 1 if the bar is missed."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    reading()  # fills the disk cache and writes the bytecode
    torch_s, octavo_s = map(statistics.median, zip(*(reading() for _ in range(rounds)), strict=True))
    print(f"import torch   {torch_s:6.3f} s")
    print(f"import octavo  {torch_s + octavo_s:6.3f} s")
    print(f"octavo adds    {octavo_s:6.3f} s (bar: {BAR_S} s; medians of {rounds} fresh processes)")
    return 0 if octavo_s <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
