"""The cost of serving: requests in a closed and in an open loop, to octavo's engine or any server's URL."""

from octavo.bench.serving.comparison import Target, Workload, measured
from octavo.bench.serving.load import AnswerTimes, Ask, Prompt, closed_loop, open_loop, poisson_arrivals

__all__ = [
    "AnswerTimes",
    "Ask",
    "Prompt",
    "Target",
    "Workload",
    "closed_loop",
    "measured",
    "open_loop",
    "poisson_arrivals",
]
