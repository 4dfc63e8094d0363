"""Events of requests, finish reasons and token counts."""

from dataclasses import dataclass
from enum import StrEnum

from octavo.inference.sampling import SampledToken

__all__ = ["Event", "FinishReason", "Usage"]


class FinishReason(StrEnum):
    """Reason why an answer ended."""

    STOP = "stop"  # a stop text, a stop token, or the model's end token
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"  # cancelled by the client or the server
    DEADLINE = "deadline"  # deadline_s passed
    ERROR = "error"  # logits not finite, or the engine failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: length of the prompt.
        reused_tokens: of them, those whose keys and values were in the cache.
        answer_tokens: generated tokens.
    """

    prompt_tokens: int
    reused_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Event of a request: a new token, the end, or both. Only the last event has a finish reason and a usage.

    Attributes:
        token: sampled token; None if the answer ended without one.
        logprob: natural logarithm of the token's probability, if requested.
        top: ids and log probabilities of the likeliest tokens, if requested.
        prompt: prompt tokens from the second on with their log probabilities, in the first event, if requested.
        text: text that became final since the last event; may be empty.
        finish: reason why the answer ended; None before.
        usage: token counts, at the end.
        error: message, if the reason is an error.
    """

    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[SampledToken, ...] = ()
    text: str = ""
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
