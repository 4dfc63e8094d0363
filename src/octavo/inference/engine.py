"""Engine with continuous batching.

A step reads one token of every request that is generating, and as many prompt tokens as fit, in one call of the model;
then every request whose tokens are all read samples its next. Requests start and end between steps.

- **The tokens of a request do not depend on other requests**, bit for bit: the logits of a row depend only on its own
  sequence (``Runner.read_rows``), and every request has its own random generator.
- **Pages are allocated when a request starts**, enough for its longest answer, so that no request is ever preempted.
  Requests start in order of arrival; one that does not fit waits, and so do those after it.
- **Prompts with the same beginning share pages** (block_pool.py).
- One thread calls :meth:`Engine.step`; :meth:`Engine.submit` and :meth:`Engine.cancel` are thread-safe.

The engine depends on the outside only by a clock and by ``tell``, a callback of each request that gets its events.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import torch

from octavo.errors import ClosedError, ConfigError, ContextLengthError, QueueFullError
from octavo.formats import E4M3, Format
from octavo.inference.block_pool import BlockPool
from octavo.inference.decoder_weights import Saturation
from octavo.inference.events import Event, FinishReason
from octavo.inference.kv_cache import KVCacheBatch
from octavo.inference.metrics import EngineMetrics, Load
from octavo.inference.native_decoder import PAGE, CacheTensors
from octavo.inference.sampling import SamplingParams
from octavo.inference.sequence import EngineRequest
from octavo.inference.text_stream import TextStream
from octavo.models import LlamaConfig
from octavo.nn.arguments import check_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Engine", "EngineConfig", "Runner"]

MOST_RUNNING = 1 << 16


class Runner(Protocol):
    """Interface of a model as an engine runs it: ``ModelRunner`` or ``ProfileRunner``."""

    @property
    def config(self) -> LlamaConfig:
        """Sizes of the model."""

    @property
    def saturation(self) -> Saturation:
        """Counts of input elements cast with static scales."""

    def new_batch(self, sequences: int, max_positions: int | None = None, *, fmt: Format) -> KVCacheBatch:
        """Create empty caches for several sequences."""

    def read_rows(
        self,
        tokens: torch.Tensor,
        tensors: CacheTensors,
        *,
        sequence: torch.Tensor,
        position: torch.Tensor,
        num_logits: int,
    ) -> torch.Tensor:
        """Read tokens of several sequences; a row's logits depend only on its own, bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of an engine.

    Attributes:
        max_running: concurrent requests, at most 65,536.
        max_waiting: requests in the queue; more are refused.
        cache_positions: positions in the cache of all running requests; rounded up to pages.
        step_rows: most tokens per step, at least ``max_running``. More process prompts faster and delay running
            answers longer.
        cache_format: format of keys and values: E4M3, BF16 or FP32; of a ``ProfileRunner``, its ``cache_format``.

    Raises:
        ConfigError: a number out of range, or fewer rows than running requests.
    """

    max_running: int = 16
    max_waiting: int = 64
    cache_positions: int = 16384
    step_rows: int = 256
    cache_format: Format = E4M3

    def __post_init__(self) -> None:
        for limit in fields(self):
            if limit.type is int:
                check_whole(limit.name, getattr(self, limit.name), least=1)
        if self.max_running > MOST_RUNNING:
            raise ConfigError(f"max_running must be at most {MOST_RUNNING:,}, not {self.max_running:,}")
        if self.step_rows < self.max_running:
            raise ConfigError(
                f"step_rows must be at least max_running, {self.max_running}, not {self.step_rows}: a step reads a "
                "token of each running request"
            )


class Engine:
    """Generator of answers to concurrent requests.

    Args:
        runner: model on a CPU.
        tokenizer: decodes tokens to text.
        end_ids: tokens that end an answer.
        config: limits.
        clock: returns seconds; for deadlines and metrics.

    Attributes:
        metrics: counters since the start.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from octavo.inference import ModelRunner
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
        >>> engine, num_logits = Engine(ModelRunner(Llama(config)), words), []
        >>> request = engine.submit([0, 1], SamplingParams(max_tokens=3, temperature=0), num_logits.append)
        >>> while engine.step():
        ...     pass
        >>> len(num_logits), num_logits[-1].finish.value, num_logits[-1].usage.answer_tokens, engine.load.pages_used
        (3, 'length', 3, 0)
    """

    def __init__(
        self,
        runner: Runner,
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
        ).tensors  # first: raises if the memory is insufficient
        self._pool = BlockPool(count)
        longest = min(self._pool.pages, -(-runner.config.max_positions // PAGE))
        self._cache = replace(pages, table=torch.zeros(self.config.max_running, longest, dtype=torch.int32))
        self._rows = list(range(self.config.max_running))  # free rows of the table
        self._running: list[EngineRequest] = []
        self._waiting: deque[EngineRequest] = deque()
        self._changed = threading.Condition()  # guards the queue, the start of requests, and _closed
        self._closed = False

    @property
    def load(self) -> Load:
        """Consistent snapshot of the load: a request that starts counts as waiting or running."""
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
        """Most positions of a prompt with its answer, limited by the model and the cache."""
        return min(self._runner.config.max_positions, self._pool.pages * PAGE)

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return self._runner.config.vocab_size

    @property
    def closed(self) -> bool:
        """True if new requests are refused."""
        return self._closed

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, tell: Callable[[Event], None]) -> EngineRequest:
        """Queue a request.

        Args:
            prompt_ids: at least one token id.
            params: sampling parameters.
            tell: called with every event in order, by the thread that calls :meth:`step`; the last event has a finish
                reason. It must be fast and must not raise.

        Returns:
            Request for :meth:`cancel`.

        Raises:
            ConfigError: an empty prompt, or a token outside the vocabulary.
            ContextLengthError: more positions than the model or the cache has.
            QueueFullError: the queue is full; with the time after which to retry.
            ClosedError: the engine is closed.
        """
        text = TextStream(self._tokenizer, params.stop)
        request = EngineRequest(list(prompt_ids), params, text=text, on_event=tell, submitted_at=self._clock())
        self._check(request)
        with self._changed:
            if self._closed:
                raise ClosedError("this engine is shutting down and accepts no requests; use another")
            if len(self._waiting) >= self.config.max_waiting:
                self.metrics.refused += 1
                seconds = self._retry_after_s()
                raise QueueFullError(
                    f"the queue is full with {len(self._waiting)} requests; try again in {seconds:g} s",
                    retry_after_s=seconds,
                )
            self._waiting.append(request)
            self.metrics.submitted += 1
            self._changed.notify_all()
        return request

    def cancel(self, request: EngineRequest) -> None:
        """End a request before the next step; no effect on one that has ended."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """End all requests before the next step."""
        with self._changed:
            for request in [*self._running, *self._waiting]:
                request.cancelled = True

    def close(self) -> None:
        """Refuse new requests; accepted ones are still answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for_work(self) -> bool:
        """Wait for requests; return False if there are none and the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._waiting or self._closed)
            return bool(self._running or self._waiting)

    def step(self) -> bool:
        """Start and end requests, call the model once and sample tokens; return False if no request is left."""
        self._end_overdue()
        self._start_waiting()
        chunks = self._chunks()
        if chunks:
            self._read(chunks)
        return bool(self._running or self._waiting)

    def fail(self, error: str) -> None:
        """End all requests with an error and refuse new ones."""
        self.close()
        for request in [*self._running, *self._take_waiting(lambda _: True)]:
            self._end(request, FinishReason.ERROR, error=error)

    def _check(self, request: EngineRequest) -> None:
        tokens, positions = request.tokens, self.positions
        if not tokens:
            raise ConfigError("the prompt is empty; give at least one token to continue from")
        untyped: list[object] = [*tokens]  # callers may pass other types
        if not all(isinstance(token, int) and 0 <= token < self.vocab_size for token in untyped):
            raise ConfigError(f"token ids must be integers from 0 to {self.vocab_size - 1}; this prompt has others")
        needed = len(tokens) + request.params.max_tokens - 1
        if needed > positions:
            raise ContextLengthError(
                f"a prompt of {len(tokens)} tokens and an answer of up to {request.params.max_tokens} need {needed} "
                f"positions, and there are {positions}; shorten the prompt or lower max_tokens"
            )

    def _retry_after_s(self) -> float:
        """Estimate of the time until the queue has room: mean time of an answer / running requests, at least 1 s."""
        answers = self.metrics.answer_s
        return math.ceil(max(1.0, answers.total / max(answers.count, 1) / self.config.max_running))

    def _end_overdue(self) -> None:
        now = self._clock()

        def reason(request: EngineRequest) -> FinishReason | None:
            limit = request.params.deadline_s
            if request.cancelled:
                return FinishReason.CANCELLED
            return FinishReason.DEADLINE if limit is not None and now - request.submitted_at >= limit else None

        for request in [*self._running, *self._take_waiting(lambda request: reason(request) is not None)]:
            if (finish := reason(request)) is not None:
                self._end(request, finish)

    def _take_waiting(self, condition: Callable[[EngineRequest], bool]) -> list[EngineRequest]:
        with self._changed:
            removed = [request for request in self._waiting if condition(request)]
            for request in removed:
                self._waiting.remove(request)
        return removed

    def _start_waiting(self) -> None:
        with self._changed:
            while self._waiting and self._rows and self._waiting[0].start(self._pool, self._rows[-1]):
                request = self._waiting.popleft()
                self._running.append(request)
                self._cache.table[self._rows.pop(), : len(request.pages)] = torch.tensor(request.pages)
                self.metrics.prompt_tokens += request.prompt_length
                self.metrics.reused_tokens += request.reused

    def _chunks(self) -> list[tuple[EngineRequest, int]]:
        """Requests to read with their numbers of tokens: first those with one unread token, then prompts in order."""
        budget, chunks = self.config.step_rows, []
        for request in sorted(self._running, key=lambda request: request.unread > 1):
            count = min(request.unread, budget)
            if count:
                chunks.append((request, count))
            budget -= count
        return chunks

    def _read(self, chunks: list[tuple[EngineRequest, int]]) -> None:
        rows = [(request, request.read + i) for request, count in chunks for i in range(count)]
        logit_rows = [(request, at) for request, at in rows if request.needs_logits(at)]
        rows = [(request, at) for request, at in rows if not request.needs_logits(at)] + logit_rows
        numbers = [(request.tokens[at], request.row, at) for request, at in rows]
        tokens, sequence, position = (torch.tensor(column) for column in zip(*numbers, strict=True))
        before = replace(self._runner.saturation)
        logits = self._runner.read_rows(
            tokens, self._cache, sequence=sequence, position=position, num_logits=max(len(logit_rows), 1)
        )
        self.metrics.steps += 1
        self.metrics.rows += len(rows)
        self.metrics.cast_elements += self._runner.saturation.elements - before.elements
        self.metrics.saturated_elements += self._runner.saturation.saturated - before.saturated
        for request, count in chunks:
            request.read += count
            request.publish(self._pool)
        for (request, at), row in zip(logit_rows, logits, strict=False):
            if at + 1 < len(request.tokens):
                request.score(at, row)
            else:
                self._answer(request, row)

    def _answer(self, request: EngineRequest, logits: torch.Tensor) -> None:
        try:
            sampled = request.sampler.choose(logits)
        except ConfigError as error:  # only this request's logits are not finite
            self._end(request, FinishReason.ERROR, error=str(error))
            return
        stop_ids = request.params.stop_ids if request.params.ignore_end else (*request.params.stop_ids, *self._end_ids)
        if sampled.token in stop_ids:
            self._end(request, FinishReason.STOP)
            return
        self._measure(request)
        request.add_token(sampled)
        if request.finish is not None:
            self._forget(request)

    def _measure(self, request: EngineRequest) -> None:
        now = self._clock()
        if request.last_token_at is None:
            self.metrics.first_token_s.observe(now - request.submitted_at)
        else:
            self.metrics.token_s.observe(now - request.last_token_at)
        request.last_token_at = now
        self.metrics.answer_tokens += 1

    def _end(self, request: EngineRequest, reason: FinishReason, *, error: str | None = None) -> None:
        request.end(reason, error=error)
        self._forget(request)

    def _forget(self, request: EngineRequest) -> None:
        assert request.finish is not None
        self.metrics.finished[request.finish] += 1
        self.metrics.answer_s.observe(self._clock() - request.submitted_at)
        if request in self._running:
            self._running.remove(request)
            self._rows.append(request.row)
            self._cache.table[request.row] = 0
            self._pool.release(request.pages)
