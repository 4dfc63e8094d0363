"""The lines of metrics.jsonl: one JSON object each, with a ``kind`` and a ``step``.

What the kinds are is said where they are written: by octavo.training.metrics for a run, by octavo.doctor.huggingface
for a training of Hugging Face's; how a sample of the doctor's becomes lines, in octavo.doctor.series.

The last key of each is ``sha256``: the first 16 digits of the SHA-256 of the line before's, and of this line without
its own. So a changed, missing or added line is seen at the next one, while the file is written and after a kill. Lines
cut off at the end are missed only by a reader that knows how many there were: a checkpoint's (:class:`LinesWritten`).
A file in which no line has the key is by an octavo before 2026-11-24, and is read unchecked.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.doctor.series import Sample
from octavo.errors import TrainingError
from octavo.parsing import parse_json

__all__ = ["METRICS", "LineWriter", "LinesWritten", "SampleLines", "each_line", "read_lines"]

METRICS = "metrics.jsonl"
MOST_WHOLE = 2**53  # beyond it float64 skips whole numbers
SEAL = ', "sha256": "'
DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesWritten:
    """The beginning of a file of lines: how many, and the ``sha256`` of the last of them ("" of none)."""

    lines: int = 0
    sha256: str = ""


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


class LineWriter:
    r"""Makes the lines of a file, each with its ``sha256``.

    Attributes:
        written: what was made so far.

    Example:
        >>> lines = LineWriter()
        >>> lines.line({"kind": "step", "step": 1, "loss": 2.5})
        '{"kind": "step", "step": 1, "loss": 2.5, "sha256": "0b51d58e740cf744"}\n'
        >>> lines.written
        LinesWritten(lines=1, sha256='0b51d58e740cf744')
    """

    def __init__(self) -> None:
        self.written = LinesWritten()

    def line(self, values: dict[str, Any]) -> str:
        """A line with its end.

        Raises:
            ValueError: a value is NaN or infinite, which JSON has not.
        """
        body = json.dumps(values, allow_nan=False)[:-1]
        seal = _seal(self.written.sha256, body.encode())
        self.written = LinesWritten(lines=self.written.lines + 1, sha256=seal)
        return f'{body}{SEAL}{seal}"}}\n'


def _seal(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:DIGITS]


def each_line(path: Path, *, beginning: LinesWritten | None = None) -> Iterator[dict[str, Any]]:
    """All whole lines, without their ``sha256``, one at a time; none where there is no file.

    A torn last line, left by a kill, is passed over.

    Args:
        path: of the file.
        beginning: what the file has to begin with.

    Raises:
        TrainingError: a line is not what a run writes: an object with a kind and a step, of which none is smaller than
            the one before, and numbers that a float64 holds; it was changed since; or lines are missing.
    """
    newest = 0
    for count, line in enumerate(_checked_lines(path, beginning or LinesWritten()), 1):
        value = _parsed(path, count, line)
        if value["step"] < newest:
            raise TrainingError(
                f"line {count} of {str(path)!r} has step {value['step']} after step {newest}: two runs wrote there; "
                "keep the lines of one"
            )
        newest = value["step"]
        yield value


def read_lines(path: Path, *, beginning: LinesWritten | None = None) -> list[dict[str, Any]]:
    """What :func:`each_line` yields."""
    return list(each_line(path, beginning=beginning))


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line, largest=MOST_WHOLE)
        if not isinstance(value, dict) or not {"kind", "step"} <= value.keys():
            raise ValueError("no kind or no step")
        step = value["step"]
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step {step!r}")
        value.pop("sha256", None)
        return {**value, "kind": str(value["kind"])}
    except ValueError as error:
        raise TrainingError(
            f"line {number} of {str(path)!r} is not a run's ({error}); put the file back as it was"
        ) from error


def _checked_lines(path: Path, beginning: LinesWritten) -> Iterator[bytes]:
    """Whole lines; raises where one is another than was written, or where the file is not as it began."""
    count, seal, is_sealed, begins = 0, "", False, not beginning.lines
    for count, line in enumerate(_whole_lines(path), 1):
        body, mark, end = line.rpartition(SEAL.encode())
        is_sealed = bool(mark) if count == 1 else is_sealed
        seal = _seal(seal, body) if is_sealed else ""
        if is_sealed != bool(mark) or (is_sealed and end != f'{seal}"}}'.encode()):
            raise TrainingError(
                f"line {count} of {str(path)!r} is not the one that was written there, or lines before it are missing "
                "(its sha256 is another); put the file back as it was"
            )
        begins = begins or (count == beginning.lines and seal == beginning.sha256)
        yield line
    if not begins:
        raise TrainingError(
            f"{str(path)!r} {_difference(count, beginning, is_sealed=is_sealed)}; put the file back, or train again "
            "elsewhere"
        )


def _difference(count: int, beginning: LinesWritten, *, is_sealed: bool) -> str:
    """How a file of so many lines is not as it began."""
    known = "that the run's newest checkpoint knows"
    if count and not is_sealed:
        return f"has no checksums, and the {beginning.lines} lines {known} have them"
    if count < beginning.lines:
        return f"has {count} lines, fewer than the {beginning.lines} {known}"
    return f"has other lines than the {beginning.lines} {known}, perhaps another run's"


def _whole_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]
