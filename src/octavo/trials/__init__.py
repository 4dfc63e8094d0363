"""Short training runs that answer a question: which layers cost accuracy, whether the doctor sees what is wrong."""

from octavo.trials.selftest import SelftestConfig, SelftestResult, measuring, quick, run_selftest, tuning
from octavo.trials.selftest_table import markdown, summary, tables
from octavo.trials.short_run import ShortRun, Start, short_run, start_of

__all__ = [
    "SelftestConfig",
    "SelftestResult",
    "ShortRun",
    "Start",
    "markdown",
    "measuring",
    "quick",
    "run_selftest",
    "short_run",
    "start_of",
    "summary",
    "tables",
    "tuning",
]
