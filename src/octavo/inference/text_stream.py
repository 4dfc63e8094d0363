"""Incremental decoding of tokens to text, with stop texts.

A token of a byte-level tokenizer may hold part of a character, and a stop text may span tokens. Text is therefore held
back while its last character is incomplete or its end is the beginning of a stop text.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["UNFINISHED", "TextStream"]

UNFINISHED = "\ufffd"  # decoded text of a character with missing bytes
PATIENCE = 64  # tokens without a complete character; it has four bytes, so more tokens will not complete it


class TextStream:
    """Incremental text of one answer.

    Args:
        tokenizer: tokenizer of the ids.
        stop: texts that end the answer.

    Attributes:
        stopped: whether a stop text was found; no text is returned after it.
    """

    def __init__(self, tokenizer: "Tokenizer", stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []  # a piece already returned, as context, and the ids after it
        self._said = 0  # number of ids whose text was returned
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token and return the text that became final; may be empty."""
        if self._is_left_out(token):
            return ""  # drop it, or a long run would be decoded again with each further token
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._said]), self._decode(self._ids)
        unfinished = now.endswith(UNFINISHED) or len(now) <= len(before)
        if unfinished and len(self._ids) - self._said < PATIENCE:
            return ""
        self._ids, self._said = self._ids[self._said :], len(self._ids) - self._said
        return self._search(now[len(before) :])

    def finish(self) -> str:
        """Return the text that was held back, without an incomplete last character."""
        before, now = self._decode(self._ids[: self._said]), self._decode(self._ids)
        text = self._search(now[len(before) :].rstrip(UNFINISHED))
        text, self._held = text + self._held, ""
        return text

    def _is_left_out(self, token: int) -> bool:
        """Return True for ids without text in any context: special tokens and unknown ids.

        Other tokens may decode to an empty text alone but not after another token: a space at the start of a text.
        """
        if self._decode([token]):
            return False
        unknown = self._tokenizer.id_to_token(token) is None
        return unknown or bool(self._tokenizer.decode([token], skip_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def _search(self, text: str) -> str:
        """Return the text up to the first stop text or a possible beginning of one, which is held back."""
        text = self._held + text
        places = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if places or self.stopped:
            self.stopped, self._held = True, ""
            return text[: min(places, default=0)]
        overlap = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` at the end of ``text``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
