"""How much of one text stands in another: whether what is chosen on the one can be verified on the other.

Names do not tell. ``own.txt`` and ``./own.txt`` are one file, ``builtin`` has all of ``library-sources`` in it, and a
copy has a path of its own. So the texts are compared, line by line:

    share = characters of the other text's lines that are lines of this one too / characters of all its lines

Lines are taken within the pieces that splits are made of (``octavo.training.text``), without the spaces around them.

Two splits of one source are never compared: they are apart by construction. Some lines are common to all text of a
kind: by this count a quarter of the built-in corpus's test split stands in its training split as well, and 95 % of the
language topics.
"""

from collections.abc import Iterator

from octavo.errors import ConfigError
from octavo.training.corpus import Split
from octavo.training.text import ALL, BUILTIN, divide, load_documents, same_source

__all__ = ["MOST_SHARED", "Part", "shared_share"]

MOST_SHARED = 0.5  # between what text of a kind has in common and the same text, see above

Part = tuple[str, str]  # a source and a split, see text_windows


def shared_share(this: Part, other: Part) -> float:
    """The share of ``other`` that is in ``this`` too, from 0 to 1.

    Args:
        this: a source and its split, as for :func:`octavo.quantization.text_windows`.
        other: likewise.

    Raises:
        ConfigError: an unknown split.
        DataError: a source holds no text.

    Example:
        >>> (
        ...     shared_share(("builtin", "train"), ("builtin", "test")),
        ...     shared_share(("builtin", "all"), ("builtin", "test")),
        ... )
        (0.0, 1.0)
    """
    (source, split), (other_source, other_split) = this, other
    for name in (split, other_split):
        if name not in (*Split, ALL):
            raise ConfigError(f"split must be one of {', '.join(Split)}, {ALL}, not {name!r}")
    if same_source(source, other_source):
        return 1.0 if split == other_split or ALL in (split, other_split) else 0.0
    known = {*_lines(source, split)}
    lengths = [(len(line), line in known) for line in _lines(other_source, other_split)]
    return sum(length for length, is_known in lengths if is_known) / max(1, sum(length for length, _ in lengths))


def _lines(source: str, split: str) -> Iterator[str]:
    parts = divide(load_documents(source), by_file=source == BUILTIN)
    for name, documents in parts.items():
        if split in (name, ALL):
            for document in documents:
                yield from (line.strip() for line in document.text.splitlines())
