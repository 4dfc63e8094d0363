"""Tokens in, text out: whole characters only, and nothing that may yet turn out to be a stop text.

A token of a byte-level tokenizer may be half a character, and a stop text may begin in one token and end in another. So
text is held back while its last character is unfinished, and as long as its end is the beginning of a stop text.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TextStream"]

UNFINISHED = "\ufffd"  # what a character decodes to while some of its bytes are missing
PATIENCE = 64  # tokens that end no character; one has four bytes, so what these began will never be one


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: whose ids come.
        stop: texts before which the answer ends.

    Attributes:
        stopped: whether one was found; nothing is said after it.
    """

    def __init__(self, tokenizer: "Tokenizer", stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []  # those since a place where a character ended, and before it one piece as context
        self._said = 0  # of them, those whose text is out
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after one more token; empty where it is not."""
        if self._is_left_out(token):
            return ""  # kept, a long run of them would be decoded again with each further one
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._said]), self._decode(self._ids)
        unfinished = now.endswith(UNFINISHED) or len(now) <= len(before)
        if unfinished and len(self._ids) - self._said < PATIENCE:
            return ""
        self._ids, self._said = self._ids[self._said :], len(self._ids) - self._said
        return self._search(now[len(before) :])

    def finish(self) -> str:
        """What was held back, without a character that was never finished."""
        before, now = self._decode(self._ids[: self._said]), self._decode(self._ids)
        said = self._search(now[len(before) :].rstrip(UNFINISHED))
        rest, self._held = self._held, ""
        return said + rest

    def _is_left_out(self, token: int) -> bool:
        """Whether decoding leaves an id out wherever it stands: a special token, or one that the tokenizer has not.

        Others may be empty alone and not behind another: a space where a text begins.
        """
        if self._decode([token]):
            return False
        unknown = self._tokenizer.id_to_token(token) is None
        return unknown or bool(self._tokenizer.decode([token], skip_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def _search(self, text: str) -> str:
        """``text`` up to the first stop text, or to what may be the beginning of one."""
        text = self._held + text
        places = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if places or self.stopped:
            self.stopped, self._held = True, ""
            return text[: min(places, default=0)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How long the longest end of ``text`` is with which ``stop`` begins, without being all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
