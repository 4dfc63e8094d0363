"""The lines of metrics.jsonl: one JSON object each, with a ``kind`` and a ``step``.

What the kinds are is said where they are written: by octavo.training.metrics for a run, by octavo.doctor.huggingface
for a training of Hugging Face's; how a sample of the doctor's becomes lines, in octavo.doctor.series.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from octavo.doctor.series import Sample
from octavo.errors import TrainingError
from octavo.parsing import parse_json

__all__ = ["METRICS", "SampleLines", "each_line", "line_of", "read_lines"]

METRICS = "metrics.jsonl"
MOST_WHOLE = 2**53  # beyond it float64 skips whole numbers


class SampleLines:
    """Turns samples into lines: names where they are new, then numbers.

    Args:
        before: the lines that stand in the file already.

    Example:
        >>> sample = Sample(step=1, casts={}, products={}, parameters={})
        >>> lines = SampleLines([])
        >>> [kind for kind, _ in lines.of(sample)], [kind for kind, _ in lines.of(sample)]
        (['watched', 'statistics'], ['statistics'])
    """

    def __init__(self, before: Iterable[dict[str, Any]]) -> None:
        watched = [line for line in before if line["kind"] == "watched"]
        self._names = {key: value for key, value in (watched or [{}])[-1].items() if key not in ("kind", "step")}

    def of(self, sample: Sample) -> Iterator[tuple[str, dict[str, Any]]]:
        """The kind and the values of each line."""
        names = sample.names()
        if names != self._names:
            self._names = names
            yield "watched", names
        yield "statistics", sample.values()


def line_of(kind: str, step: int, values: dict[str, Any]) -> str:
    r"""A line with its end.

    Raises:
        ValueError: a value is NaN or infinite, which JSON has not.

    Example:
        >>> line_of("step", 1, {"loss": 2.5})
        '{"kind": "step", "step": 1, "loss": 2.5}\n'
    """
    return json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n"


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines, one at a time; none where there is no file. A torn last line, left by a kill, is passed over.

    Raises:
        TrainingError: another line is not what a run writes: an object with a kind and a step, of which none is smaller
            than the one before, and numbers that a float64 holds.
    """
    if not path.exists():
        return
    newest = 0
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            value = parse_json(line, largest=MOST_WHOLE)
            step = value["step"]
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise ValueError(f"step {step!r}")
            value["kind"] = str(value["kind"])
        except (ValueError, TypeError, KeyError) as error:
            raise TrainingError(f"line {number} of {str(path)!r} is not a run's; remove the line") from error
        if step < newest:
            raise TrainingError(
                f"line {number} of {str(path)!r} has step {step} after step {newest}: two runs wrote there; keep the "
                "lines of one"
            )
        newest = step
        yield value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What :func:`each_line` yields."""
    return list(each_line(path))


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]
