"""Short training runs that answer a question: which layers cost accuracy, whether a run is fit to start."""

from octavo.trials.bisect import Bisection, Part, bisect
from octavo.trials.preflight import Check, preflight
from octavo.trials.setting import Setting, run_data, setting_of
from octavo.trials.short_run import ShortRun, Start, short_run, start_of

__all__ = [
    "Bisection",
    "Check",
    "Part",
    "Setting",
    "ShortRun",
    "Start",
    "bisect",
    "preflight",
    "run_data",
    "setting_of",
    "short_run",
    "start_of",
]
