"""What goes into the engine and what comes out: requests, their events, and why an answer ended."""

from dataclasses import dataclass
from enum import StrEnum

from octavo.inference.sampling import Chosen

__all__ = ["Event", "FinishReason", "Usage"]


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # a stop text, a stop token, or the model's own last token
    LENGTH = "length"  # as many tokens as asked for
    CANCELLED = "cancelled"  # whoever asked went away
    DEADLINE = "deadline"  # it took too long
    ERROR = "error"  # its logits were not finite, or the engine broke


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request took.

    Attributes:
        prompt_tokens: length of the prompt.
        reused_tokens: of them, those whose keys and values were there already.
        answer_tokens: tokens that were told.
    """

    prompt_tokens: int
    reused_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened to a request. The last one, and no other, has a reason and a usage.

    Attributes:
        token: the token that was chosen; None where the answer ended without one.
        logprob: natural logarithm of the model's probability of it, if asked for.
        top: ids and logarithms of the likeliest tokens, if asked for.
        prompt: the prompt's tokens from the second on, with their probabilities: in the first event, if asked for.
        text: what is certain of the text since the last event; perhaps nothing yet.
        finish: why the answer ended; None while it goes on.
        usage: what it took, at the end.
        error: a sentence, where the reason is an error.
    """

    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[Chosen, ...] = ()
    text: str = ""
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
