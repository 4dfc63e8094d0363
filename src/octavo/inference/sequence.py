"""State of one request in the engine: its tokens, progress, cache pages and events."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from octavo.inference.block_pool import BlockPool, page_keys
from octavo.inference.events import Event, FinishReason, Usage
from octavo.inference.native_decoder import PAGE
from octavo.inference.sampling import SampledToken, Sampler, SamplingParams, score_token
from octavo.inference.text_stream import TextStream

__all__ = ["EngineRequest"]


class EngineRequest:
    """Request that is waiting, running or finished.

    Args:
        prompt_ids: at least one token id.
        params: sampling parameters.
        text: decoder of the answer's tokens.
        on_event: called with every event in order.
        submitted_at: time of the engine's clock, in seconds.

    Attributes:
        tokens: prompt and answer so far.
        read: number of tokens whose keys and values are in the cache.
        reused: number of them that were in the cache at the start.
        pages: pages in order; empty while waiting.
        row: row of the cache's table; -1 while waiting.
        cancelled: whether to end it before the next step.
        finish: reason why the answer ended; None before.
        last_token_at: time of the last token on the engine's clock; None before the first.
        sampler: sampler of the next token.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        text: TextStream,
        on_event: Callable[[Event], None],
        submitted_at: float,
    ) -> None:
        self.tokens, self.prompt_length, self.params = list(prompt_ids), len(prompt_ids), params
        self.submitted_at = submitted_at
        self.last_token_at: float | None = None
        self.read, self.reused, self.row = 0, 0, -1
        self.pages: list[int] = []
        self.cancelled = False
        self.finish: FinishReason | None = None
        self.sampler, self._text, self._on_event = Sampler(params), text, on_event
        self._keys: list[bytes] = []
        self._prompt: list[SampledToken] = []

    @property
    def answer_length(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def unread(self) -> int:
        """Number of tokens to read before the next can be sampled."""
        return len(self.tokens) - self.read

    def needs_logits(self, position: int) -> bool:
        """Return True if the logits at a position are needed: for the next token or for ``prompt_logprobs``."""
        return position + 1 == len(self.tokens) or (self.params.prompt_logprobs and position + 1 < self.prompt_length)

    @cached_property
    def _reusable(self) -> list[bytes]:
        """Keys of the prompt's pages that may be reused; cached, since a waiting request needs them every step."""
        reusable = 0 if self.params.prompt_logprobs else (self.prompt_length - 1) // PAGE * PAGE
        return [*page_keys(self.tokens[:reusable])]

    def start(self, pool: BlockPool, row: int) -> bool:
        """Allocate all pages that may be needed; return False and allocate nothing if there are too few.

        At least the last token of the prompt is read, to get its logits; with ``prompt_logprobs`` all of them are.
        """
        shared = pool.find(self._reusable)
        positions = self.prompt_length + self.params.max_tokens - 1  # the last token is never read
        fresh = -(-positions // PAGE) - len(shared)
        if not pool.can_take(fresh, shared):
            return False
        pool.share(shared)
        self.pages, self.row = shared + pool.take(fresh), row
        self.read = self.reused = len(shared) * PAGE
        return True

    def publish(self, pool: BlockPool) -> None:
        """Share the pages that are full."""
        shared = len(self._keys)
        parent = self._keys[-1] if shared else b""
        self._keys += page_keys(self.tokens[shared * PAGE : self.read // PAGE * PAGE], parent=parent)
        for page, key in zip(self.pages[shared : len(self._keys)], self._keys[shared:], strict=True):
            pool.publish(page, key)

    def score(self, position: int, logits: Tensor) -> None:
        """Store the log probability of the prompt token after ``position``, from the logits [V] at ``position``."""
        assert self.params.logprobs is not None
        self._prompt.append(score_token(logits, self.tokens[position + 1], top=self.params.logprobs))

    def add_token(self, sampled: SampledToken) -> None:
        """Append a token and send its event; finish if it completes a stop text or reaches ``max_tokens``."""
        self.tokens.append(sampled.token)
        event = Event(token=sampled.token, logprob=sampled.logprob, top=sampled.top, text=self._text.add(sampled.token))
        if self._text.stopped:
            self._finish(event, FinishReason.STOP)
        elif self.answer_length == self.params.max_tokens:
            self._finish(event, FinishReason.LENGTH)
        else:
            self._send(event)

    def end(self, reason: FinishReason, *, error: str | None = None) -> None:
        """Send a last event without a token."""
        self._finish(Event(error=error), reason)

    def _finish(self, event: Event, reason: FinishReason) -> None:
        self.finish = reason
        usage = Usage(prompt_tokens=self.prompt_length, reused_tokens=self.reused, answer_tokens=self.answer_length)
        self._send(replace(event, text=event.text + self._text.finish(), finish=reason, usage=usage))

    def _send(self, event: Event) -> None:
        """Send an event; the first one includes the prompt's log probabilities."""
        self._on_event(replace(event, prompt=tuple(self._prompt)) if self._prompt else event)
        self._prompt = []
