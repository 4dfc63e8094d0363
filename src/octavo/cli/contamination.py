"""Who has read the text that a model is measured on: its training, a calibration, a tuning for FP8."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from octavo.cli.runs import own_source, text_to_train_on
from octavo.errors import DataError
from octavo.quantization import load_calibration
from octavo.quantization.qat.folder import MARK, text_of_qat
from octavo.text.corpus import Split
from octavo.text.overlap import MOST_SHARED, TextSplit, shared_share
from octavo.text.sources import ALL, unseen_split

__all__ = ["default_split", "readers_of", "shares_read", "warnings_of"]

Readers = Mapping[str, TextSplit]


def readers_of(
    model: str | Path, *, calibrates: bool = False, calibration: Path | None = None, tuned: Path | None = None
) -> Readers:
    """What each of them has read, by name, as far as it was written down.

    Args:
        model: a run has been trained on its own text.
        calibrates: whether a calibration takes part.
        calibration: its folder; None is one that is made now.
        tuned: a folder of ``octavo qat``; None where the model itself may be one.

    Raises:
        CheckpointError: a folder is damaged.
    """
    found: dict[str, TextSplit] = {}
    if own := own_source(model):
        found["the run's training"] = (own, Split.TRAIN)
    if calibrates:
        found["the calibration"] = (text_to_train_on(model), Split.TRAIN)
        if calibration is not None:
            seen = load_calibration(calibration).seen
            found["the calibration"] = (seen.source, seen.split)
    tuned = Path(model) if tuned is None and (Path(model) / MARK).is_file() else tuned
    if tuned is not None:
        found["the tuning for FP8"] = text_of_qat(tuned)
    return {name: part for name, part in found.items() if part[1]}


def default_split(model: str | Path, readers: Readers, source: str) -> str:
    """The split of a source that none of them has read, nor would by default: so it is one text for all formats.

    See ``octavo.text.sources.unseen_split``.
    """
    known = [text_to_train_on(model), *(own for own, _ in readers.values())]
    return str(Split.TEST) if Split.TEST in {unseen_split(source, each) for each in known} else ALL


def shares_read(readers: Readers, source: str, split: str) -> dict[str, float | None]:
    """How much of a text each has read, from 0 to 1; None where what it has read is not there any more.

    Raises:
        ConfigError: an unknown split.
    """
    found: dict[str, float | None] = {}
    for name, part in readers.items():
        try:
            found[name] = shared_share(part, (source, split))
        except DataError:  # of its part: the text that is measured has been read by now
            found[name] = None
    return found


def warnings_of(shares: Mapping[str, float | None], source: str, split: str) -> Iterator[str]:
    """A sentence for each that has read most of the text, or whose own text is gone."""
    for name, share in shares.items():
        if share is None:
            yield f"warning: the text of {name} is not there any more: whether {source}, {split} is in it is not known"
        elif share > MOST_SHARED:
            yield (
                f"warning: {share:.0%} of {source}, {split} is text of {name}; on text that is new to it the loss may "
                "be higher"
            )
