"""``bytes_per_token``: the most bytes of a text that one token can stand for, so that a text is refused by its length.

No token of a byte-level BPE stands for more than the longest entry of its vocabulary. That holds where every byte of a
text ends in some token. It does not hold where a step may leave out or merge any length of text: unknown characters
(models other than a BPE of all 256 bytes), whitespace that a pre-tokenizer or an added token swallows, a normaliser
that strips, a truncation. For such a tokenizer there is no bound.

NFC is let through, since it shortens a text by a factor of ``NFC_SHRINKS`` at most: 3 for a character that stands for
another (the Kelvin sign has 3 bytes and K has 1), and 3 for what is composed (a Hangul syllable of 3 bytes from 9).
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
    """The most that one token stands for; None where a token may stand for any length.

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
    """One step, or those of a sequence."""
    if record is None:
        return []
    return [step for part in record[parts] for step in _steps(part, parts)] if parts in record else [record]


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    return step["type"] in {*LOSSLESS, "NFC"} or (step["type"] == "Split" and step["behavior"] != "Removed")


def _has_all_bytes(record: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> bool:
    """Whether it is a BPE that knows every byte, and whose added tokens swallow no whitespace."""
    from tokenizers import pre_tokenizers

    model, added = record["model"], record["added_tokens"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return (
        model["type"] == "BPE"
        and any(step["type"] == "ByteLevel" for step in steps)
        and all(letter in model["vocab"] for letter in alphabet)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
