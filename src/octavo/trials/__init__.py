"""Short training runs that answer a question: which layers cost accuracy, whether a run is fit to start."""

from octavo.trials.bisect import Bisection, Part, bisect
from octavo.trials.origin import Origin, origin_of, run_data
from octavo.trials.preflight import Check, preflight
from octavo.trials.short_run import ShortRun, Start, short_run, start_of

__all__ = [
    "Bisection",
    "Check",
    "Origin",
    "Part",
    "ShortRun",
    "Start",
    "bisect",
    "origin_of",
    "preflight",
    "run_data",
    "short_run",
    "start_of",
]
