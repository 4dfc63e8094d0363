"""``python -m tests.fuzz --seconds 600 --seed 7``: damage and read, reader after reader, and print what gets out."""

import argparse
import faulthandler
import itertools
import time

from tests.fuzz.cases import ReaderError, run_case
from tests.fuzz.readers import READERS

HANG_SECONDS = 120  # in a library's own code, where no signal is seen; the process ends there, and says where


def main() -> int:
    """Return 1 where something has left a reader that should not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, help="the first case; without it the seed times a million")
    parser.add_argument("--cases", type=int, help="of each reader; without it until the time is over")
    parser.add_argument("--reader", choices=READERS, action="append")
    given = parser.parse_args()
    names = given.reader or list(READERS)
    first = given.seed * 1_000_000 if given.first is None else given.first
    end = time.monotonic() + given.seconds
    counts, failures = dict.fromkeys(names, 0), dict[str, int]()
    for case in itertools.count(first):
        if time.monotonic() > end or (given.cases is not None and case >= first + given.cases):
            break
        for name in names:
            if (case - first) % READERS[name].cost:
                continue
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            print(f"\r{name} {case}\x1b[K", end="", flush=True)
            counts[name] += 1
            try:
                run_case(name, case)
            except ReaderError as failure:
                failures[name] = failures.get(name, 0) + 1
                print(f"\r{failure}\x1b[K", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(
        f"\r\x1b[K{sum(counts.values()):,} cases of {len(names)} readers, {sum(failures.values())} failures: {failures}"
    )
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
