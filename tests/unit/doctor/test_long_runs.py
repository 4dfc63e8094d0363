"""What a long run costs the doctor: memory that grows with its steps, and no faster."""

import json
import tracemalloc

import numpy as np
import pytest

from octavo.doctor import diagnose, series_of
from octavo.doctor.metrics_lines import each_line
from octavo.doctor.series import CastKey, Sample
from octavo.doctor.statistics import CAST_FIELDS

SHORT = 10_000


def losses(steps):
    """A loss that falls and then loses its gain: every window of the rule about it is looked at."""
    share = np.arange(steps) / steps
    falling = 2.5 + 5 * np.exp(-8 * share) + 0.05 * np.random.default_rng(0).normal(size=steps)
    return np.where(share < 0.7, falling, falling + 5).tolist()


def lines(steps):
    for step, loss in enumerate(losses(steps), 1):
        rate = min(1.0, step / (steps / 100))
        yield {"kind": "step", "step": step, "loss": loss, "lr": rate, "grad_norm": loss, "tokens": step, "threads": 2}


def peak_of(work):
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def findings(steps):
    series = series_of(lines(steps))
    return diagnose(series, reference=series)


@pytest.mark.long
def test_memory_grows_with_the_steps_and_no_faster():
    short, found = peak_of(lambda: findings(SHORT))
    long, also_found = peak_of(lambda: findings(3 * SHORT))
    assert [one.code for one in found] == [one.code for one in also_found] == ["divergence"]
    assert long < 3.5 * short
    assert long < 600 * 3 * SHORT, "bytes a step"


@pytest.mark.long
def test_lines_of_a_file_are_not_held(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(SHORT)))
    peak, series = peak_of(lambda: series_of(each_line(path)))
    numbers = sum(steps.nbytes + values.nbytes for steps, values in series.curves.values())
    assert peak < 3.5 * numbers, "a line's dictionary is 8 times its numbers"


@pytest.mark.long
@pytest.mark.parametrize("names", [("a", "b", "c"), ("a", "b", "c", "d")])
def test_long_run_takes_little_more_memory_than_its_numbers(names):
    """The second run has a layer more than the first from half of its looks on."""

    def samples():
        for step in range(1, 2001):
            present = names[: 3 if step <= 1000 else None]
            casts = {CastKey(name, "input", "output"): np.ones(len(CAST_FIELDS)) for name in present}
            values = Sample(step=step, casts=casts, products={}, parameters={})
            yield {"kind": "watched", "step": step, **values.names()}
            yield {"kind": "statistics", "step": step, **values.values()}

    peak, series = peak_of(lambda: series_of(samples()))
    assert series.casts.values.shape == (2000, len(names), len(CAST_FIELDS))
    assert peak < 2.5 * series.casts.values.nbytes
