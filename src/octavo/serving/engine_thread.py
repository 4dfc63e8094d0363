"""A thread that steps an engine, and answers as asyncio wants them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from collections.abc import Sequence as Listed
from types import TracebackType

import torch

from octavo.kernels.threads import release_threads
from octavo.serving.engine import Engine
from octavo.serving.requests import Event
from octavo.serving.sampling import SamplingParams

__all__ = ["Answer", "EngineThread"]


class EngineThread:
    """Steps an engine from a thread of its own, while there is work.

    Args:
        engine: nobody else may step it.

    Attributes:
        engine: the same.
        failure: what broke the engine; None while it works.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from octavo.models import Llama, LlamaConfig
        >>> from octavo.serving import ModelRunner
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
        >>> thread = EngineThread(Engine(ModelRunner(Llama(config)), words))
        >>> async def count() -> int:
        ...     async with thread.answer([0, 1], SamplingParams(max_tokens=4)) as events:
        ...         return len([event async for event in events])
        >>> asyncio.run(count())
        4
        >>> thread.drain()
        True
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: Exception | None = None
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        release_threads()  # of whoever loaded the model
        self._thread.start()

    def answer(self, prompt_ids: Listed[int], params: SamplingParams) -> "Answer":
        """Ask for an answer, from a running event loop; see :meth:`octavo.serving.Engine.submit` for what it raises."""
        return Answer(self.engine, prompt_ids, params)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait until those taken are answered; False where the time was not enough."""
        self.engine.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # each thread has a number of its own
        try:
            while self.engine.wait_for_work():
                while self.engine.step():
                    pass
                release_threads()
        except Exception as error:
            self.failure = error
            self.engine.fail(f"the engine broke: {error}")
            raise  # to the thread's own report


class Answer:
    """The events of one request, for ``async with`` and ``async for``; leaving the block cancels what is left of it."""

    def __init__(self, engine: Engine, prompt_ids: Listed[int], params: SamplingParams) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._engine = engine
        self._request = engine.submit(prompt_ids, params, self._tell)

    async def __aenter__(self) -> AsyncIterator[Event]:
        return self._each()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.cancel(self._request)

    async def _each(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if event.finish is not None:
                return

    def _tell(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop was closed, so nobody listens any more
            self._engine.cancel(self._request)
