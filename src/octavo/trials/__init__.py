"""Short training runs that answer a question: which layers cost accuracy, whether a run is fit to start."""

from octavo.trials.short_run import ShortRun, Start, short_run, start_of

__all__ = ["ShortRun", "Start", "short_run", "start_of"]
