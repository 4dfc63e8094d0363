"""``Engine``: the answers of many requests at once, each as if it were alone.

A step reads a token of every request that is answering, and as many tokens of prompts as fit beside them, in one call
of the model; then every request whose tokens are all read chooses its next. Requests come and go between steps.

- **A request's tokens do not depend on the others**, to the bit: a row's logits depend on its own sequence alone
  (``ModelRunner.read_rows``), and every request draws from a generator of its own.
- **Pages are taken when a request starts**, as many as its longest answer needs, so that none is ever pushed out again.
  Requests start in the order they came; one that does not fit waits, and those behind it, too.
- **Prompts that begin alike share pages** (block_pool.py).
- One thread calls :meth:`Engine.step`; :meth:`Engine.submit` and :meth:`Engine.cancel` may be called by any.

What an engine knows of the world is the clock and ``tell``, a function for each request that is given its events.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from octavo.errors import ClosedError, ConfigError, ContextLengthError, QueueFullError
from octavo.formats import E4M3, Format
from octavo.inference.block_pool import BlockPool
from octavo.inference.metrics import EngineMetrics, Load
from octavo.inference.model_runner import ModelRunner
from octavo.inference.native_decoder import PAGE
from octavo.inference.requests import Event, FinishReason
from octavo.inference.sampling import SamplingParams
from octavo.inference.sequence import Sequence
from octavo.inference.text_stream import TextStream
from octavo.nn.arguments import check_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Engine", "EngineConfig"]

MOST_RUNNING = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much an engine takes on.

    Attributes:
        max_running: requests that are answered at once, at most 65,536.
        max_waiting: requests in the queue, above which more are refused.
        cache_positions: room for the keys and values of all running requests; rounded up to pages.
        step_rows: tokens that a step reads at most, ``max_running`` at least. More read prompts faster and keep answers
            waiting longer.
        cache_format: of keys and values: E4M3, BF16 or FP32.

    Raises:
        ConfigError: a number below 1 or above the most, or fewer rows than running requests.
    """

    max_running: int = 16
    max_waiting: int = 64
    cache_positions: int = 16384
    step_rows: int = 256
    cache_format: Format = E4M3

    def __post_init__(self) -> None:
        for own in fields(self):
            if own.type is int:
                check_whole(own.name, getattr(self, own.name), least=1)
        if self.max_running > MOST_RUNNING:
            raise ConfigError(f"max_running must be at most {MOST_RUNNING:,}, not {self.max_running:,}")
        if self.step_rows < self.max_running:
            raise ConfigError(
                f"a step reads a token of each of {self.max_running} running requests, so step_rows must be at least "
                f"as many, not {self.step_rows}"
            )


class Engine:
    """Answers requests.

    Args:
        runner: the model, on a CPU.
        tokenizer: makes text of tokens.
        end_ids: tokens with which the model ends an answer.
        config: how much is taken on.
        clock: seconds; for deadlines and what is measured.

    Attributes:
        metrics: what was counted so far.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from octavo.models import Llama, LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=3,
        ...     hidden_size=32,
        ...     intermediate_size=64,
        ...     num_layers=1,
        ...     num_heads=2,
        ...     num_kv_heads=1,
        ...     max_positions=16,
        ... )
        >>> words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
        >>> engine, told = Engine(ModelRunner(Llama(config)), words), []
        >>> request = engine.submit([0, 1], SamplingParams(max_tokens=3, temperature=0), told.append)
        >>> while engine.step():
        ...     pass
        >>> len(told), told[-1].finish.value, told[-1].usage.answer_tokens, engine.load.pages_used
        (3, 'length', 3, 0)
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: "Tokenizer",
        *,
        end_ids: Iterable[int] = (),
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.metrics = config or EngineConfig(), EngineMetrics()
        self._runner, self._tokenizer, self._end_ids, self._clock = runner, tokenizer, frozenset(end_ids), clock
        count = -(-self.config.cache_positions // PAGE)
        pages = runner.new_batch(
            count, PAGE, fmt=self.config.cache_format
        ).tensors  # refused first, if there is no room
        self._pool = BlockPool(count)
        longest = min(self._pool.pages, -(-runner.config.max_positions // PAGE))
        self._cache = replace(pages, table=torch.zeros(self.config.max_running, longest, dtype=torch.int32))
        self._rows = list(range(self.config.max_running))  # of the table, those that are free
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._changed = threading.Condition()  # guards what waits, its start, and whether the engine is closed
        self._closed = False

    @property
    def load(self) -> Load:
        """How busy the engine is, at one moment: a request that starts is waiting or running, never neither."""
        pool = self._pool
        with self._changed:
            return Load(
                waiting=len(self._waiting),
                running=len(self._running),
                pages=pool.pages,
                pages_used=pool.used,
                pages_idle=pool.idle,
            )

    @property
    def positions(self) -> int:
        """How many a prompt and its answer may have together: what the model knows and the cache has room for."""
        return min(self._runner.config.max_positions, self._pool.pages * PAGE)

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self._runner.config.vocab_size

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closed

    def submit(self, prompt_ids: Listed[int], params: SamplingParams, tell: Callable[[Event], None]) -> Sequence:
        """Take a request; its events come from whoever calls :meth:`step`.

        Args:
            prompt_ids: at least one token.
            params: what is asked for.
            tell: is given every event, in order; the last has a reason. It must be quick, and must not raise.

        Returns:
            What :meth:`cancel` takes.

        Raises:
            ConfigError: an empty prompt, or a token outside the vocabulary.
            ContextLengthError: more positions than the model or the cache has.
            QueueFullError: too many wait; says when to try again.
            ClosedError: the engine takes no more.
        """
        text = TextStream(self._tokenizer, params.stop)
        made = Sequence(list(prompt_ids), params, text=text, tell=tell, submitted_at=self._clock())
        self._check(made)
        with self._changed:
            if self._closed:
                raise ClosedError("this engine is being shut down and takes no more requests; ask another")
            if len(self._waiting) >= self.config.max_waiting:
                self.metrics.refused += 1
                seconds = self._retry_after_s()
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting, which is as many as may; try again in {seconds:g} s",
                    retry_after_s=seconds,
                )
            self._waiting.append(made)
            self.metrics.submitted += 1
            self._changed.notify_all()
        return made

    def cancel(self, request: Sequence) -> None:
        """End a request before the next step; one that is over stays as it is."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """End all requests before the next step."""
        with self._changed:
            for request in [*self._running, *self._waiting]:
                request.cancelled = True

    def close(self) -> None:
        """Take no more requests; those that were taken are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for_work(self) -> bool:
        """Return True as soon as there is something to do; False where there is none and none can come."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._waiting or self._closed)
            return bool(self._running or self._waiting)

    def step(self) -> bool:
        """One call of the model, and what comes before and after it; False where there was nothing to do."""
        self._end_overdue()
        self._start_waiting()
        chunks = self._chunks()
        if chunks:
            self._read(chunks)
        return bool(self._running or self._waiting)

    def fail(self, error: str) -> None:
        """End all requests, and take no more: the engine broke."""
        self.close()
        for request in [*self._running, *self._take_waiting(lambda _: True)]:
            self._end(request, FinishReason.ERROR, error=error)

    def _check(self, request: Sequence) -> None:
        tokens, positions = request.tokens, self.positions
        if not tokens:
            raise ConfigError("the prompt is empty; give at least one token to continue from")
        given: list[object] = [*tokens]  # whoever asks may not be typed
        if not all(isinstance(token, int) and 0 <= token < self.vocab_size for token in given):
            raise ConfigError(f"token ids are whole numbers from 0 to {self.vocab_size - 1}; this prompt has others")
        needed = len(tokens) + request.params.max_tokens - 1
        if needed > positions:
            raise ContextLengthError(
                f"a prompt of {len(tokens)} tokens and an answer of up to {request.params.max_tokens} need {needed} "
                f"positions, and there are {positions}; shorten the prompt or lower max_tokens"
            )

    def _retry_after_s(self) -> float:
        """When a place in the queue may be free: what an answer took so far, over those that end in that time."""
        answers = self.metrics.answer_s
        return math.ceil(max(1.0, answers.total / max(answers.count, 1) / self.config.max_running))

    def _end_overdue(self) -> None:
        now = self._clock()

        def reason(request: Sequence) -> FinishReason | None:
            limit = request.params.deadline_s
            if request.cancelled:
                return FinishReason.CANCELLED
            return FinishReason.DEADLINE if limit is not None and now - request.submitted_at >= limit else None

        for request in [*self._running, *self._take_waiting(lambda request: reason(request) is not None)]:
            if (why := reason(request)) is not None:
                self._end(request, why)

    def _take_waiting(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        with self._changed:
            taken = [request for request in self._waiting if wanted(request)]
            for request in taken:
                self._waiting.remove(request)
        return taken

    def _start_waiting(self) -> None:
        with self._changed:
            while self._waiting and self._rows and self._waiting[0].start(self._pool, self._rows[-1]):
                request = self._waiting.popleft()
                self._running.append(request)
                self._cache.table[self._rows.pop(), : len(request.pages)] = torch.tensor(request.pages)
                self.metrics.prompt_tokens += request.prompt_length
                self.metrics.reused_tokens += request.reused

    def _chunks(self) -> list[tuple[Sequence, int]]:
        """Whose next tokens are read, and how many: first those that wait for one alone, then prompts as they came."""
        budget, chunks = self.config.step_rows, []
        for request in sorted(self._running, key=lambda request: request.unread > 1):
            count = min(request.unread, budget)
            if count:
                chunks.append((request, count))
            budget -= count
        return chunks

    def _read(self, chunks: list[tuple[Sequence, int]]) -> None:
        rows = [(own, own.read + i) for own, count in chunks for i in range(count)]
        told = [(own, at) for own, at in rows if own.told_after(at)]
        rows = [(own, at) for own, at in rows if not own.told_after(at)] + told
        numbers = [(own.tokens[at], own.row, at) for own, at in rows]
        tokens, sequence, position = (torch.tensor(column) for column in zip(*numbers, strict=True))
        before = replace(self._runner.saturation)
        logits = self._runner.read_rows(
            tokens, self._cache, sequence=sequence, position=position, told=max(len(told), 1)
        )
        self.metrics.steps += 1
        self.metrics.rows += len(rows)
        self.metrics.cast_elements += self._runner.saturation.elements - before.elements
        self.metrics.saturated_elements += self._runner.saturation.saturated - before.saturated
        for request, count in chunks:
            request.read += count
            request.publish(self._pool)
        for (request, at), own in zip(told, logits, strict=False):
            if at + 1 < len(request.tokens):
                request.score(at, own)
            else:
                self._answer(request, own)

    def _answer(self, request: Sequence, logits: torch.Tensor) -> None:
        try:
            chosen = request.choose(logits)
        except ConfigError as error:  # its logits are not finite; others' may be
            self._end(request, FinishReason.ERROR, error=str(error))
            return
        stop_ids = request.params.stop_ids if request.params.ignore_end else (*request.params.stop_ids, *self._end_ids)
        if chosen.token in stop_ids:
            self._end(request, FinishReason.STOP)
            return
        self._measure(request)
        request.say(chosen)
        if request.finish is not None:
            self._forget(request)

    def _measure(self, request: Sequence) -> None:
        now = self._clock()
        if request.told_at is None:
            self.metrics.first_token_s.observe(now - request.submitted_at)
        else:
            self.metrics.token_s.observe(now - request.told_at)
        request.told_at = now
        self.metrics.answer_tokens += 1

    def _end(self, request: Sequence, reason: FinishReason, *, error: str | None = None) -> None:
        request.end(reason, error=error)
        self._forget(request)

    def _forget(self, request: Sequence) -> None:
        assert request.finish is not None
        self.metrics.finished[request.finish] += 1
        self.metrics.answer_s.observe(self._clock() - request.submitted_at)
        if request in self._running:
            self._running.remove(request)
            self._rows.append(request.row)
            self._cache.table[request.row] = 0
            self._pool.release(request.pages)
