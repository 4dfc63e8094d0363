"""Short training runs that answer a question: which layers cost accuracy, whether the doctor sees what is wrong."""

from octavo.trials.bisect import Bisection, Part, bisect
from octavo.trials.origin import Origin, origin_of, run_data
from octavo.trials.preflight import Check, preflight
from octavo.trials.selftest import SelftestConfig, SelftestResult, measuring, quick, run_selftest, tuning
from octavo.trials.selftest_table import markdown, summary, tables
from octavo.trials.short_run import ShortRun, Start, short_run, start_of

__all__ = [
    "Bisection",
    "Check",
    "Origin",
    "Part",
    "SelftestConfig",
    "SelftestResult",
    "ShortRun",
    "Start",
    "bisect",
    "markdown",
    "measuring",
    "origin_of",
    "preflight",
    "quick",
    "run_data",
    "run_selftest",
    "short_run",
    "start_of",
    "summary",
    "tables",
    "tuning",
]
