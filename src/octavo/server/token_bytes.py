"""Upper bound on the bytes of text per token, by which a text is refused before it is tokenized.

A token of a byte-level BPE stands for at most the longest entry of its vocabulary, provided that every byte of a text
becomes part of a token. A step that can drop or merge text of any length breaks this: unknown characters (models other
than a BPE of all 256 bytes), whitespace removed by a pre-tokenizer or an added token, a normalizer that strips, a
truncation. Such a tokenizer has no bound.

NFC is allowed, since it shortens a text at most by ``NFC_SHRINKS``: a factor 3 for replaced characters (the Kelvin sign
has 3 bytes, K has 1), and 3 for composed ones (a Hangul syllable has 3 bytes instead of 9).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.parsing import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["bytes_per_token"]

NFC_SHRINKS = 9
LOSSLESS = {"ByteLevel", "Digits"}


def bytes_per_token(tokenizer: "Tokenizer") -> int | None:
    """Return the largest number of bytes that one token can stand for; None without a bound.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> bytes_per_token(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
        True
    """
    record = parse_json(tokenizer.to_str())
    steps = _steps(record["normalizer"], "normalizers") + _steps(record["pre_tokenizer"], "pretokenizers")
    if not all(map(_keeps_bytes, steps)) or not _has_all_bytes(record, steps) or record["truncation"] is not None:
        return None
    longest = max(len(entry.encode()) for entry in tokenizer.get_vocab(with_added_tokens=True))
    return longest * (NFC_SHRINKS if any(step["type"] == "NFC" for step in steps) else 1)


def _steps(record: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    """Return the steps of a component, with sequences flattened."""
    if record is None:
        return []
    return [step for part in record[parts] for step in _steps(part, parts)] if parts in record else [record]


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    return step["type"] in {*LOSSLESS, "NFC"} or (step["type"] == "Split" and step["behavior"] != "Removed")


def _has_all_bytes(record: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> bool:
    """Return True for a BPE of all 256 bytes whose added tokens strip no whitespace."""
    from tokenizers import pre_tokenizers

    model, added = record["model"], record["added_tokens"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return (
        model["type"] == "BPE"
        and any(step["type"] == "ByteLevel" for step in steps)
        and all(letter in model["vocab"] for letter in alphabet)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
