"""A study with known answers, for the tests of the table and the report."""

import math
from typing import Any

from octavo.training.comparison import RunMeasures, Study

STEPS = 400
WINDOWS = 64


def curve(offset: float, every: int) -> tuple[tuple[int, float], ...]:
    return tuple(
        (step, 2.6 + 4.2 * math.exp(-step / 90) + offset * (1 + 4 * math.exp(-step / 60)) + 0.03 * math.sin(step))
        for step in range(0, STEPS + 1, every)
    )


def run(recipe: str, offset: float, **changes: Any) -> RunMeasures:
    fields: dict[str, Any] = {
        "recipe": recipe,
        "steps": STEPS,
        "train_curve": curve(offset, 1),
        "validation_curve": curve(offset, 25),
        "window_nats": tuple(2.7 + offset + 0.4 * math.sin(window) for window in range(WINDOWS)),
        "tokens_per_second": 5000.0,
        "peak_memory_bytes": 700 << 20,
        "gradient_variance": 2.0,
        "gradient_error": 0.0,
        "threads": (2,),
    }
    return RunMeasures(**(fields | changes))


def study(*runs: RunMeasures) -> Study:
    return Study(
        runs=runs
        or (
            run("fp32", 0.0),
            run("bf16", 0.0005, gradient_variance=2.002, gradient_error=0.004, tokens_per_second=4000.0),
            run("tensorwise", 0.0025, gradient_variance=2.1, gradient_error=0.06, tokens_per_second=2000.0),
        ),
        config={"training": {"steps": STEPS}},
        facts={"model": "2.1 M parameters, 4 layers of width 192", "torch": "2.13.0", "corpus": "a <synthetic> text"},
        unigram_nats=5.9,
        prompt="def main(",
        samples={"tensorwise": "argv):\n    return <0> & run(argv)\n", "bf16": "self):\n    pass\n"},
    )
