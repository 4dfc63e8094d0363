"""One request on its way through the engine: its tokens, how far they are read, its pages, and what it says."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from octavo.inference.block_pool import BlockPool, page_keys
from octavo.inference.native_decoder import PAGE
from octavo.inference.requests import Event, FinishReason, Usage
from octavo.inference.sampling import Chooser, Chosen, SamplingParams, scored
from octavo.inference.text_stream import TextStream

__all__ = ["Sequence"]


class Sequence:
    """A request and its state: waiting, then running, then over.

    Args:
        prompt_ids: at least one token.
        params: what is asked for.
        text: makes text of the answer's tokens.
        tell: is given every event, in order.
        submitted_at: the engine's time, in seconds.

    Attributes:
        tokens: the prompt and the answer so far.
        read: how many of them have their keys and values in the cache.
        reused: how many of these were there already.
        pages: their pages, in order; empty while waiting.
        row: of the cache's table; -1 while waiting.
        cancelled: whoever asked went away.
        finish: why the answer ended; None before.
        told_at: the engine's time of the last token; None before the first.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        text: TextStream,
        tell: Callable[[Event], None],
        submitted_at: float,
    ) -> None:
        self.tokens, self.prompt_length, self.params = list(prompt_ids), len(prompt_ids), params
        self.submitted_at = submitted_at
        self.told_at: float | None = None
        self.read, self.reused, self.row = 0, 0, -1
        self.pages: list[int] = []
        self.cancelled = False
        self.finish: FinishReason | None = None
        self._chooser, self._text, self._tell = Chooser(params), text, tell
        self._keys: list[bytes] = []
        self._prompt: list[Chosen] = []

    @property
    def answer_length(self) -> int:
        """How many tokens were told."""
        return len(self.tokens) - self.prompt_length

    @property
    def unread(self) -> int:
        """How many tokens have to be read before the next can be chosen."""
        return len(self.tokens) - self.read

    def told_after(self, position: int) -> bool:
        """Whether the logits after the token there are needed: the last token's, and a prompt's if it is scored."""
        return position + 1 == len(self.tokens) or (self.params.prompt_logprobs and position + 1 < self.prompt_length)

    @property
    def pages_needed(self) -> int:
        """How many pages the longest answer takes; its last token is told and never read."""
        return -(-(self.prompt_length + self.params.max_tokens - 1) // PAGE)

    @cached_property
    def _reusable(self) -> list[bytes]:
        """Keys of the prompt's pages that may be there already; asked for before every step while the request waits."""
        reusable = 0 if self.params.prompt_logprobs else (self.prompt_length - 1) // PAGE * PAGE
        return [*page_keys(self.tokens[:reusable])]

    def start(self, pool: BlockPool, row: int) -> bool:
        """Take all pages that may be needed; False, and nothing is taken, where there are too few.

        At least one token of the prompt is read anew: what follows it is known only then. If the prompt is scored, so
        are all of them.
        """
        shared = pool.find(self._reusable)
        fresh = self.pages_needed - len(shared)
        if not pool.can_take(fresh, shared):
            return False
        pool.share(shared)
        self.pages, self.row = shared + pool.take(fresh), row
        self.read = self.reused = len(shared) * PAGE
        return True

    def publish(self, pool: BlockPool) -> None:
        """Let others find the pages that are full."""
        known = len(self._keys)
        parent = self._keys[-1] if known else b""
        self._keys += page_keys(self.tokens[known * PAGE : self.read // PAGE * PAGE], parent=parent)
        for page, key in zip(self.pages[known : len(self._keys)], self._keys[known:], strict=True):
            pool.publish(page, key)

    def score(self, position: int, logits: Tensor) -> None:
        """Keep how probable the token of the prompt behind ``position`` was, from logits [V] after it."""
        assert self.params.logprobs is not None
        self._prompt.append(scored(logits, self.tokens[position + 1], top=self.params.logprobs))

    def choose(self, logits: Tensor) -> Chosen:
        """The next token, from logits [V]."""
        return self._chooser.choose(logits)

    def say(self, chosen: Chosen) -> None:
        """Tell a token; the last one, where it completes a stop text or is as far as was asked for."""
        self.tokens.append(chosen.token)
        event = Event(token=chosen.token, logprob=chosen.logprob, top=chosen.top, text=self._text.add(chosen.token))
        if self._text.stopped:
            self._finish(event, FinishReason.STOP)
        elif self.answer_length == self.params.max_tokens:
            self._finish(event, FinishReason.LENGTH)
        else:
            self._say(event)

    def end(self, reason: FinishReason, *, error: str | None = None) -> None:
        """Tell that the answer is over, without another token."""
        self._finish(Event(error=error), reason)

    def _finish(self, event: Event, reason: FinishReason) -> None:
        self.finish = reason
        usage = Usage(prompt_tokens=self.prompt_length, reused_tokens=self.reused, answer_tokens=self.answer_length)
        self._say(replace(event, text=event.text + self._text.finish(), finish=reason, usage=usage))

    def _say(self, event: Event) -> None:
        """With what is known of the prompt, once."""
        self._tell(replace(event, prompt=tuple(self._prompt)) if self._prompt else event)
        self._prompt = []
