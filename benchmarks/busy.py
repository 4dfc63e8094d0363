"""Time of two threads while another process keeps a core busy, and on free cores.

    python -m benchmarks.busy --before FILE [--rounds 4] [--no-write]

FILE is the extension of an earlier build (``octavo/kernels/_native.*.so``), which the same Python code uses in a
separate process. Timed are GEMMs of one row with FP8 matrices of 4096 x 4096, a cast of as many BF16 numbers, a token
of a decoder of SmolLM2-135M's shape, and forward and backward of the demo's model with the recipe tensorwise.

Calls are warmed up and timed in turn, in rounds. The other process is a loop bound to the last core. Bars: with it, two
threads take at most 1.1 times as long as one; on free cores they take at most 1.05 times as long as those of the
earlier build, the largest difference between two runs of one build.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.busy_worker import KINDS, TIMED_S
from benchmarks.measure import hardware, markdown_table, publish, ratio, verdict

BUSY_BAR, IDLE_BAR = 1.1, 1.05
NOW, BEFORE = "now", "before"
COLUMNS = ("timed", "machine", "measured", "times as long", "bar", "verdict")


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="an earlier build's extension")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine = hardware()
    with Worker() as now, Worker(arguments.before) as before:
        workers = {NOW: now, BEFORE: before}
        idle = timed(workers, [(NOW, 2), (BEFORE, 2)], arguments.rounds)
        with busy_core():
            busy = timed(workers, [(NOW, 1), (NOW, 2), (BEFORE, 2)], arguments.rounds)
    lines = [
        *markdown_table(COLUMNS, rows_of(idle, busy)),
        "",
        f"Median of {arguments.rounds} interleaved rounds of {TIMED_S} s each (quartiles).",
    ]
    publish("busy", lines, title="Beside a busy process", machine=machine, write=not arguments.no_write)


Seconds = dict[str, dict[str, list[float]]]


def timed(workers: "Mapping[str, Worker]", runs: list[tuple[str, int]], rounds: int) -> Seconds:
    """Seconds of a call by kind, then by build and threads."""
    seconds: Seconds = {kind: {f"{build}, {threads}": [] for build, threads in runs} for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            for build, threads in runs:
                seconds[kind][f"{build}, {threads}"].append(workers[build].time(kind, threads))
    return seconds


def rows_of(idle: Seconds, busy: Seconds) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kind and bar, and one for the earlier build."""
    for kind in KINDS:
        rows = (
            ("busy", "2 threads beside 1", ratio(busy[kind], f"{NOW}, 2", f"{NOW}, 1"), BUSY_BAR),
            ("busy", "2 threads beside 1, before", ratio(busy[kind], f"{BEFORE}, 2", f"{NOW}, 1"), None),
            ("idle", "2 threads beside 2 before", ratio(idle[kind], f"{NOW}, 2", f"{BEFORE}, 2"), IDLE_BAR),
        )
        for state, what, measured, bar in rows:
            judged = "" if bar is None else verdict(measured.median <= bar)
            yield kind, state, what, str(measured), str(bar or ""), judged


@contextmanager
def busy_core() -> Iterator[None]:
    """Context in which another process computes on the last core."""
    process = multiprocessing.get_context("spawn").Process(target=_compute, daemon=True)
    process.start()
    time.sleep(1)
    try:
        yield
    finally:
        process.kill()
        process.join()


def _compute() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    while True:
        pass


class Worker:
    """A process that times calls with one build of the extension."""

    def __init__(self, *extension: str) -> None:
        command = [sys.executable, "-m", "benchmarks.busy_worker", *extension]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def time(self, kind: str, threads: int) -> float:
        """Seconds of a call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(f"{threads} {kind}", file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    main()
