"""The lines of metrics.jsonl: one JSON object each, with a ``kind`` and a ``step``.

The kinds are documented where they are written: octavo.training.metrics for a run, octavo.doctor.huggingface for
Hugging Face's Trainer, and octavo.doctor.series for the doctor's samples.

The last key of each line is ``sha256``: the first 16 digits of the SHA-256 of the previous line's ``sha256`` and this
line without its own. A changed, missing or added line is thus detected at the next line, also in a file that is still
being written or was cut off by a kill. Missing lines at the end are detected only with the expected number of lines,
which a checkpoint records (:class:`LinesWritten`). Files without this key, written before 2026-11-24, are not checked.
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
MAX_INTEGER = 2**53  # float64 represents every integer up to here
CHECKSUM_KEY = ', "sha256": "'
DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesWritten:
    """Number of lines written to a file, and the ``sha256`` of the last one ("" without lines)."""

    lines: int = 0
    sha256: str = ""


class SampleLines:
    """Converts samples to lines: names whenever they change, then numbers.

    Args:
        before: the lines already in the file.

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
        """Yield the kind and the values of each line."""
        names = sample.names()
        if names != self._names:
            self._names = names
            yield "watched", names
        yield "statistics", sample.values()


class LineWriter:
    r"""Formats the lines of a file, each with its ``sha256``.

    Attributes:
        written: number of lines formatted so far, and the last checksum.

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
        """Format one line, including the newline.

        Raises:
            ValueError: a value is NaN or infinite, which JSON does not support.
        """
        body = json.dumps(values, allow_nan=False)[:-1]
        checksum = _checksum(self.written.sha256, body.encode())
        self.written = LinesWritten(lines=self.written.lines + 1, sha256=checksum)
        return f'{body}{CHECKSUM_KEY}{checksum}"}}\n'


def _checksum(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:DIGITS]


def each_line(path: Path, *, beginning: LinesWritten | None = None) -> Iterator[dict[str, Any]]:
    """Yield all complete lines without their ``sha256``; none without a file.

    An incomplete last line, left by a kill, is skipped.

    Args:
        path: the file.
        beginning: lines that the file must start with.

    Raises:
        TrainingError: a line is not an object with a kind, a step not smaller than the previous one, and numbers that
            fit a float64; a line was changed; or lines are missing.
    """
    newest = 0
    for count, line in enumerate(_checked_lines(path, beginning or LinesWritten()), 1):
        value = _parse_line(path, count, line)
        if value["step"] < newest:
            raise TrainingError(
                f"line {count} of {str(path)!r} has step {value['step']} after step {newest}: two runs wrote there; "
                "keep the lines of one"
            )
        newest = value["step"]
        yield value


def read_lines(path: Path, *, beginning: LinesWritten | None = None) -> list[dict[str, Any]]:
    """List of the lines that :func:`each_line` yields."""
    return list(each_line(path, beginning=beginning))


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line, largest=MAX_INTEGER)
        if not isinstance(value, dict) or not {"kind", "step"} <= value.keys():
            raise ValueError("no kind or no step")
        step = value["step"]
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step {step!r}")
        value.pop("sha256", None)
        return {**value, "kind": str(value["kind"])}
    except ValueError as error:
        raise TrainingError(
            f"line {number} of {str(path)!r} is not a line of a run ({error}); put the file back as it was"
        ) from error


def _checked_lines(path: Path, beginning: LinesWritten) -> Iterator[bytes]:
    """Yield complete lines; raise if one was changed or the file does not start with ``beginning``."""
    count, checksum, has_checksum, matches_beginning = 0, "", False, not beginning.lines
    for count, line in enumerate(_complete_lines(path), 1):
        body, mark, end = line.rpartition(CHECKSUM_KEY.encode())
        has_checksum = bool(mark) if count == 1 else has_checksum
        checksum = _checksum(checksum, body) if has_checksum else ""
        if has_checksum != bool(mark) or (has_checksum and end != f'{checksum}"}}'.encode()):
            raise TrainingError(
                f"line {count} of {str(path)!r} was changed, or lines before it are missing (sha256 mismatch); "
                "put the file back as it was"
            )
        matches_beginning = matches_beginning or (count == beginning.lines and checksum == beginning.sha256)
        yield line
    if not matches_beginning:
        raise TrainingError(
            f"{str(path)!r} {_difference(count, beginning, has_checksum=has_checksum)}; put the file back, or train "
            "again elsewhere"
        )


def _difference(count: int, beginning: LinesWritten, *, has_checksum: bool) -> str:
    """Difference between a file of ``count`` lines and its ``beginning``, as a predicate."""
    known = "that the run's newest checkpoint records"
    if count and not has_checksum:
        return f"has no checksums, and the {beginning.lines} lines {known} have them"
    if count < beginning.lines:
        return f"has {count} lines, fewer than the {beginning.lines} {known}"
    return f"has other lines than the {beginning.lines} {known}, perhaps another run's"


def _complete_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]
