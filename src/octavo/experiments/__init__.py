"""Short training runs that find the layers that cost accuracy, or check a configuration before a long run."""

from octavo.experiments.bisect import Bisection, Part, bisect
from octavo.experiments.origin import Origin, origin_of, run_data
from octavo.experiments.preflight import Check, preflight
from octavo.experiments.short_run import ShortRun, Start, short_run, start_of

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
