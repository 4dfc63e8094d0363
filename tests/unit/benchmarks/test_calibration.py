"""The bar of calibration's throughput, judged on made-up times; the observers' bytes on a small model."""

import pytest

from benchmarks import calibration
from octavo.quantization.calibration.ranges import Method
from tests.unit.quantization.calibration.test_observers import llama, token_batches


@pytest.mark.parametrize(("counted", "once", "speed", "verdict"), [
    (10.0, 0.0, "1.00", "met"), (12.0, 64.0, "0.77", "met"), (14.2, 64.0, "0.66", "missed"),
    (15.0, 0.0, "0.67", "missed")
])  # fmt: skip
def test_reading_and_what_is_done_once_count_together(counted, once, speed, verdict):
    """Two windows take an evaluation 10 s, so 128 take 640 s."""
    seconds = {calibration.PLAIN: [10.0] * 3, calibration.COUNTED: [counted] * 3}
    seconds |= {str(method): [once] * 3 for method in Method}
    lines = calibration.lines_of(seconds, [2**20, 2**20], windows=2)
    assert len(lines) == 2 + len(Method) + 2
    assert f"| {speed} ({speed}–{speed}) | {verdict} |" in lines[2]
    assert "The observers hold 1.0 MiB after one batch and 1.0 MiB after more." in lines[-1]


def test_every_contestant_runs_and_the_observers_do_not_grow():
    model, batches = llama(), tuple(token_batches(3))
    runs = calibration.contestants(model, batches)
    assert list(runs) == [calibration.PLAIN, calibration.COUNTED, *map(str, Method)]
    for run in runs.values():
        run()
    first, later = calibration.kept_bytes(model, batches)
    assert first == later > 0
