"""Learning rate schedule: linear warm-up, then half a cosine down to a floor.

``adjust_for_fp8`` is the heuristic of the article whose system octavo builds: 0.85 times the learning rate and 1.5
times the warm-up. It has no derivation and is off by default (``adjust_for_fp8 = true`` in a run's training section
applies it): a comparison of precisions keeps everything else equal.
"""

import math

__all__ = ["adjust_for_fp8", "learning_rate"]

FP8_LEARNING_RATE_FACTOR = 0.85
FP8_WARMUP_FACTOR = 1.5


def learning_rate(step: int, *, peak: float, floor: float, warmup: int, steps: int) -> float:
    """Learning rate of update number ``step``.

    In the warm-up, peak · step / warmup; after it, floor + (peak − floor) · (1 + cos(π · progress)) / 2, where
    progress runs from 0 at the warm-up's end to 1 at ``steps``.

    Args:
        step: 1 for the first update.
        peak: highest rate.
        floor: rate of the last update.
        warmup: updates until the peak; 0 starts there.
        steps: updates of the whole run.

    Example:
        >>> [round(learning_rate(step, peak=1.0, floor=0.1, warmup=2, steps=4), 3) for step in (1, 2, 3, 4)]
        [0.5, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def adjust_for_fp8(lr: float, warmup: int) -> tuple[float, int]:
    """The article's heuristic: a lower peak and a longer warm-up, rounded to a whole step.

    Example:
        >>> adjust_for_fp8(1e-3, 100)
        (0.00085, 150)
    """
    return lr * FP8_LEARNING_RATE_FACTOR, round(warmup * FP8_WARMUP_FACTOR)
