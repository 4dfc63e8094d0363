"""Which folders are runs, for the commands that take one, and what text a run has been trained on."""

from pathlib import Path

from octavo.errors import ConfigError
from octavo.language_model import Kind, kind_of
from octavo.quantization.overlap import MOST_SHARED, shared_share
from octavo.training.config import load_config
from octavo.training.corpus import Split
from octavo.training.run_folder import CONFIG
from octavo.training.text import LIBRARY_SOURCES

__all__ = ["check_is_run", "own_source", "share_trained_on", "text_to_train_on", "warn_of_trained_text"]


def check_is_run(path: Path) -> None:
    """Point from a study's folder to its runs.

    Raises:
        ConfigError: the folder holds a study, which has several models.
    """
    inside = sorted(str(child.parent) for child in path.glob(f"*/{CONFIG}"))
    if inside:
        raise ConfigError(f"{str(path)!r} holds a study of several runs; name one of {', '.join(inside)}")


def own_source(model: str | Path) -> str | None:
    """What a run was trained on; None of a model that is no run.

    Raises:
        ConfigError: the run's configuration is damaged, or there is no such model.
        CheckpointError: what is there is no model.
    """
    return load_config(Path(model) / CONFIG).data.source if kind_of(model) is Kind.RUN else None


def text_to_train_on(model: str | Path) -> str:
    """The source whose training split a model may see: a run's own, and for others nothing of the language topics.

    Those are what other models are evaluated on, and most of them lie in the built-in corpus's training split.
    """
    return own_source(model) or LIBRARY_SOURCES


def share_trained_on(model: str | Path, source: str, split: str) -> float | None:
    """How much of a text a run was trained on, from 0 to 1; None of a model that is no run, of which nobody knows.

    Raises:
        ConfigError: an unknown split.
        DataError: a source that holds no text.
    """
    own = own_source(model)
    return None if own is None else shared_share((own, Split.TRAIN), (source, split))


def warn_of_trained_text(share: float | None, source: str, split: str) -> str | None:
    """The warning that a model has been trained on most of a text; None where it has not."""
    if share is None or share <= MOST_SHARED:
        return None
    return (
        f"warning: {share:.0%} of {source}, {split} is text that the run was trained on; on text that is new to it "
        "the loss may be higher"
    )
