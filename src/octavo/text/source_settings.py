"""Settings of a text source, after its name: ``NAME?column=content&config=en&split=train&mb=100``.

They are part of the source's name, so that what was read is recorded wherever the source is. A file or folder takes
``column`` alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote

from octavo.errors import ConfigError, DataError

__all__ = ["TEXT_COLUMN", "SourceSettings", "parse_source", "text_column", "with_column"]

TEXT_COLUMN = "text"
KEYS = ("column", "config", "split", "mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Settings after a source's name.

    Attributes:
        column: the column to read; None chooses ``text``, or the only column of strings.
        config: configuration of a data set.
        split: the only split of a data set to read, which is then divided like any other text.
        megabytes: millions of UTF-8 bytes to read of each split of a data set; None reads it as a whole.
    """

    column: str | None = None
    config: str | None = None
    split: str | None = None
    megabytes: float | None = None


def parse_source(source: str) -> tuple[str, SourceSettings]:
    """Split a source into its name and its settings; an existing path is a name.

    Raises:
        ConfigError: an unknown setting, or a value that is not allowed.

    Example:
        >>> parse_source("Salesforce/wikitext?config=wikitext-2-raw-v1")[1].config
        'wikitext-2-raw-v1'
    """
    name, mark, query = source.partition("?")
    if not mark or Path(source).expanduser().exists():
        return source, SourceSettings()
    pairs = parse_qsl(query, keep_blank_values=True)
    values = dict(pairs)
    if not values or len(values) < len(pairs) or not values.keys() <= {*KEYS} or not all(values.values()):
        raise ConfigError(
            f"the settings after ? in {source!r} must be each once of {', '.join(f'{key}=…' for key in KEYS)}, joined "
            "by &, such as NAME?column=content&mb=100"
        )
    megabytes = None if "mb" not in values else _megabytes(values.pop("mb"))
    return name, SourceSettings(**values, megabytes=megabytes)


def with_column(source: str, column: str) -> str:
    """Add the column to read to a source.

    Example:
        >>> with_column("own.parquet", "content")
        'own.parquet?column=content'
    """
    name, settings = parse_source(source)
    if settings.column is not None:
        raise ConfigError(f"{source!r} names its column already; give the column once")
    return f"{source}{'?' if name == source else '&'}column={quote(column)}"


def text_column(name: str, columns: Sequence[str], column: str | None) -> str:
    """Choose the column to read: the one asked for, else ``text``, else the only one.

    Args:
        name: of the source, for messages.
        columns: names of the columns of strings.
        column: the one asked for.

    Raises:
        DataError: there is no such column, or more than one to choose from.
    """
    listed = ", ".join(columns) or "none"
    if column is not None and column not in columns:
        raise DataError(f"{name!r} has no column of text {column!r}; it has {listed}")
    if column is None and TEXT_COLUMN not in columns and len(columns) != 1:
        hint = f"choose one, such as --data '{name}?column={columns[0]}'" if columns else "give a source with one"
        raise DataError(f"{name!r} has no column {TEXT_COLUMN!r}; its columns of text are {listed}: {hint}")
    return column or (TEXT_COLUMN if TEXT_COLUMN in columns else columns[0])


def _megabytes(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"mb must be a number of megabytes above 0, not {value!r}")
    return number
