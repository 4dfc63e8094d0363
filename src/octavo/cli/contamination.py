"""Contamination of evaluation text: overlap with the text of training, calibration and tuning."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from octavo.cli.training_text import own_source, text_to_train_on
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
    """Text that training, calibration and tuning have read, by name, as far as it was recorded.

    Args:
        model: path or name of the model; a run has read its own training text.
        calibrates: whether the evaluation uses a calibration.
        calibration: folder of the calibration; None if it is computed now.
        tuned: folder of ``octavo qat``; None if ``model`` may be one.

    Raises:
        CheckpointError: a folder is damaged.
    """
    texts_read: dict[str, TextSplit] = {}
    if run_source := own_source(model):
        texts_read["the run's training"] = (run_source, Split.TRAIN)
    if calibrates:
        texts_read["the calibration"] = (text_to_train_on(model), Split.TRAIN)
        if calibration is not None:
            calibration_text = load_calibration(calibration).seen
            texts_read["the calibration"] = (calibration_text.source, calibration_text.split)
    tuned = Path(model) if tuned is None and (Path(model) / MARK).is_file() else tuned
    if tuned is not None:
        texts_read["the tuning for FP8"] = text_of_qat(tuned)
    return {name: part for name, part in texts_read.items() if part[1]}


def default_split(model: str | Path, readers: Readers, source: str) -> str:
    """Split of a source that no reader has read or would read by default, the same for all formats.

    See ``octavo.text.sources.unseen_split``.
    """
    sources_read = [text_to_train_on(model), *(read_source for read_source, _ in readers.values())]
    return str(Split.TEST) if Split.TEST in {unseen_split(source, each) for each in sources_read} else ALL


def shares_read(readers: Readers, source: str, split: str) -> dict[str, float | None]:
    """Fraction of a text that each reader has read, from 0 to 1; None if its own text no longer exists.

    Raises:
        ConfigError: an unknown split.
    """
    shares: dict[str, float | None] = {}
    for name, part in readers.items():
        try:
            shares[name] = shared_share(part, (source, split))
        except DataError:  # raised for the reader's text: the evaluated text has already been loaded
            shares[name] = None
    return shares


def warnings_of(shares: Mapping[str, float | None], source: str, split: str) -> Iterator[str]:
    """Warnings for readers of most of the text, and for those whose own text no longer exists."""
    for name, share in shares.items():
        if share is None:
            yield f"warning: the text of {name} no longer exists, so its overlap with {source}, {split} is unknown"
        elif share > MOST_SHARED:
            yield (
                f"warning: {share:.0%} of {source}, {split} is text of {name}; on unseen text the loss may be higher"
            )
