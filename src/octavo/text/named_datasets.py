"""Data sets by name, read through Hugging Face's ``datasets`` as a stream.

Rows are read in order until the megabytes asked for are reached, so that a data set of any size can be named: neither
its files nor its other rows are stored. The network is used only in a :func:`hub_access` context (``--hub``), so that a
mistyped path is not looked up there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

from octavo.errors import DataError
from octavo.text.corpus import Document, Split
from octavo.text.source_settings import SourceSettings, text_column

__all__ = ["HUB_FAMILIES", "dataset_documents", "hub_access"]

# Data sets that users know by the name of a configuration instead of OWNER/NAME.
HUB_FAMILIES = {"wikitext": "Salesforce/wikitext"}
SPLITS = {"train": Split.TRAIN, "validation": Split.VALIDATION, "test": Split.TEST}
MOST_MEGABYTES = 1000  # of a split that is to be read as a whole
MEGABYTE = 10**6

_HUB = ContextVar("hub", default=False)


@contextmanager
def hub_access() -> Iterator[None]:
    """Context in which data sets are read from the Hugging Face Hub."""
    token = _HUB.set(True)
    try:
        yield
    finally:
        _HUB.reset(token)


def dataset_documents(name: str, settings: SourceSettings) -> list[Document]:
    """Read the rows of a data set, or of a family's configuration such as ``wikitext-103-raw-v1``.

    Raises:
        DataError: outside :func:`hub_access`; the data set cannot be loaded, has several configurations or columns to
            choose from, or a split that is too large to be read as a whole.
    """
    if not _HUB.get():
        raise DataError(f"{name!r} is not an existing path; check it, or pass --hub to read that data set from the Hub")
    loaded = _load(name, settings)
    documents: list[Document] = []
    for split_name, rows in loaded.items():
        split = SPLITS.get(split_name) if len(loaded) > 1 else None  # one split is divided like any other text
        if split is not None or len(loaded) == 1:
            texts = _texts(name, split_name, _each(name, rows), settings, strings=_string_columns(rows))
            documents += (Document(f"{split_name}:{number}", text, split) for number, text in texts)
    return documents


def _load(name: str, settings: SourceSettings) -> dict[str, Any]:
    """Streams of rows by split."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"{name!r} is not an existing path, and loading it from Hugging Face's hub needs the package datasets; "
            "check the path or install octavo[hf]"
        ) from error
    family = HUB_FAMILIES.get(name.partition("-")[0]) if "/" not in name else None
    path, config = (family, name) if family else (name, settings.config)
    with _one_sentence(name):
        names = [config] if config else datasets.get_dataset_config_names(path)
    if len(names) > 1:
        raise DataError(
            f"{name!r} has the configurations {', '.join(names)}; choose one, such as '{name}?config={names[0]}'"
        )
    with _one_sentence(name):
        loaded = datasets.load_dataset(path, names[0] if names else None, split=settings.split, streaming=True)
    return {settings.split: loaded} if settings.split else dict(loaded)


def _each(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    with _one_sentence(name):
        yield from rows


def _string_columns(rows: Any) -> list[str]:
    """Columns of strings that the data set declares; none if only the rows tell."""
    types = {column: getattr(feature, "dtype", None) for column, feature in (rows.features or {}).items()}
    return [column for column, dtype in types.items() if dtype in ("string", "large_string")]


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Turn errors of the library, the network or the Hub into one sentence."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name!r} is not an existing path, and the hub could not load it: {reason}") from error


def _texts(
    name: str, split: str, rows: Iterator[dict[str, Any]], settings: SourceSettings, *, strings: list[str]
) -> Iterator[tuple[int, str]]:
    """Yield numbers and texts of the rows that fit into the megabytes."""
    first = next(rows, None)
    if first is None:
        return
    column = text_column(
        name, strings or [key for key, value in first.items() if isinstance(value, str)], settings.column
    )
    most, total = MEGABYTE * (settings.megabytes or MOST_MEGABYTES), 0
    for number, row in enumerate(chain([first], rows)):
        text = row[column]
        if not text:
            continue
        total += len(text.encode())
        if total > most and settings.megabytes is None:
            raise DataError(
                f"{name!r} has more than {MOST_MEGABYTES} MB of text in its split {split!r}; choose how much to read "
                f"of each split, such as '{name}?mb=100'"
            )
        if total > most:
            return
        yield number, text
