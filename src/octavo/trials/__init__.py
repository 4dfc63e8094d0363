"""Short training runs that answer a question: which layers cost accuracy, whether a run is fit to start."""

from octavo.trials.bisect import Bisection, Part, bisect
from octavo.trials.setting import Setting, run_data, setting_of
from octavo.trials.short_run import ShortRun, Start, short_run, start_of

__all__ = [
    "Bisection",
    "Part",
    "Setting",
    "ShortRun",
    "Start",
    "bisect",
    "run_data",
    "setting_of",
    "short_run",
    "start_of",
]
