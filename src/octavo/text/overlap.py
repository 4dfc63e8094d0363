"""Overlap of two texts: a choice made on one text can only be verified on another that is largely different.

Names are not enough: ``own.txt`` and ``./own.txt`` are one file, ``builtin`` contains ``library-sources``, and a copy
has another path. The texts are therefore compared line by line:

    share = characters of the other text's lines that also occur in this one / characters of all its lines

Lines are taken from the documents that splits consist of (``octavo.text.sources``) and stripped.

Two splits of one source are not compared: they are disjoint by construction. Some lines are common to all text of a
kind: by this measure a quarter of the built-in corpus's test split also occurs in its training split, and 95 % of the
language topics.
"""

from collections.abc import Iterator

from octavo.text.sources import ALL, BUILTIN, check_split, divide, load_documents, same_source

__all__ = ["MOST_SHARED", "TextSplit", "shared_share"]

MOST_SHARED = 0.5  # between what text of one kind has in common and identical text, see above

TextSplit = tuple[str, str]  # (source, split), see text_windows


def shared_share(this: TextSplit, other: TextSplit) -> float:
    """Share of ``other`` that also occurs in ``this``, from 0 to 1.

    Args:
        this: a source and its split, as for :func:`octavo.quantization.text_windows`.
        other: the same for the other text.

    Raises:
        ConfigError: an unknown split.
        DataError: a source has no text.

    Example:
        >>> (
        ...     shared_share(("builtin", "train"), ("builtin", "test")),
        ...     shared_share(("builtin", "all"), ("builtin", "test")),
        ... )
        (0.0, 1.0)
    """
    (source, split), (other_source, other_split) = this, other
    check_split(split)
    check_split(other_split)
    if same_source(source, other_source):
        return 1.0 if split == other_split or ALL in (split, other_split) else 0.0
    lines = {*_lines(source, split)}
    lengths = [(len(line), line in lines) for line in _lines(other_source, other_split)]
    return sum(length for length, is_known in lengths if is_known) / max(1, sum(length for length, _ in lengths))


def _lines(source: str, split: str) -> Iterator[str]:
    parts = divide(load_documents(source), by_file=source == BUILTIN)
    for name, documents in parts.items():
        if split in (name, ALL):
            for document in documents:
                yield from (line.strip() for line in document.text.splitlines())
