"""The text that a model was trained on, or may be, for the commands that take one."""

from pathlib import Path

from octavo.models.sources import SourceKind, kind_of
from octavo.text.sources import LIBRARY_SOURCES
from octavo.training.config import load_config
from octavo.training.run_folder import CONFIG

__all__ = ["own_source", "text_to_train_on"]


def own_source(model: str | Path) -> str | None:
    """What a run was trained on; None of a model that is no run.

    Raises:
        ConfigError: the run's configuration is damaged, or there is no such model.
        CheckpointError: what is there is no model.
    """
    return load_config(Path(model) / CONFIG).data.source if kind_of(model) is SourceKind.RUN else None


def text_to_train_on(model: str | Path) -> str:
    """The source whose training split a model may see: a run's own, and for others nothing of the language topics.

    Those are what other models are evaluated on, and most of them lie in the built-in corpus's training split.
    """
    return own_source(model) or LIBRARY_SOURCES
