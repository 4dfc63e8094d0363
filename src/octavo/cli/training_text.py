"""Training text of a model."""

from pathlib import Path

from octavo.models.sources import SourceKind, kind_of
from octavo.text.sources import LIBRARY_SOURCES
from octavo.training.config import load_config
from octavo.training.run_folder import CONFIG

__all__ = ["own_source", "text_to_train_on"]


def own_source(model: str | Path) -> str | None:
    """Text source that a run was trained on; None for a model that is not a run.

    Raises:
        ConfigError: the run's configuration is damaged, or there is no such model.
        CheckpointError: the path is not a model.
    """
    return load_config(Path(model) / CONFIG).data.source if kind_of(model) is SourceKind.RUN else None


def text_to_train_on(model: str | Path) -> str:
    """Source whose training split a model may read: a run's own, for other models the library sources.

    Not the built-in corpus, whose training split has most of the language topics, the evaluation text of other models.
    """
    return own_source(model) or LIBRARY_SOURCES
