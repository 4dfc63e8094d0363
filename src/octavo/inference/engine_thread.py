"""Thread that runs an engine, with answers as asynchronous iterators."""

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

import torch

from octavo.inference.engine import Engine
from octavo.inference.events import Event
from octavo.inference.sampling import SamplingParams
from octavo.kernels.threads import release_threads

__all__ = ["Answer", "EngineThread"]


class EngineThread:
    """Background thread that steps an engine while there is work.

    Args:
        engine: engine; no other thread may step it.

    Attributes:
        engine: the engine.
        failure: exception that ended the thread; None while it works.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from octavo.models import Llama, LlamaConfig
        >>> from octavo.inference import ModelRunner
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
        self.failure: BaseException | None = None
        self._undelivered: list[tuple[Answer, Event]] = []  # events of this step
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        release_threads()  # those of the thread that loaded the model
        self._thread.start()
        atexit.register(self._end)  # at exit Python kills daemon threads, which aborts if one runs C++

    def answer(self, prompt_ids: Sequence[int], params: SamplingParams) -> "Answer":
        """Submit a request from a running event loop; raises as :meth:`octavo.inference.Engine.submit`."""
        return Answer(self.engine, prompt_ids, params, on_event=lambda *event: self._undelivered.append(event))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Close the engine and wait for accepted requests to end; return False on timeout."""
        self.engine.close()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        atexit.unregister(self._end)
        return True

    def _end(self) -> None:
        self.engine.close()
        self.engine.cancel_all()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # the setting is per thread
        try:
            while self.engine.wait_for_work():
                while self.engine.step():
                    self._deliver()
                self._deliver()
                release_threads()
        except BaseException as error:  # a panic of the tokenizer is not an Exception
            self.failure = error
            self.engine.fail(f"the engine failed: {error}")
            self._deliver()
            raise  # for threading.excepthook

    def _deliver(self) -> None:
        """Wake each event loop once for all events of a step, since a loop takes the GIL from the engine."""
        delivered, self._undelivered = self._undelivered, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Answer, Event]]] = {}
        for answer, event in delivered:
            by_loop.setdefault(answer.loop, []).append((answer, event))
        for loop, events in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_out, events)
            except RuntimeError:  # the loop was closed
                for answer, _ in events:
                    answer.cancel()


def _hand_out(events: list[tuple["Answer", Event]]) -> None:
    for answer, event in events:
        answer.events.put_nowait(event)


class Answer:
    """Events of one request, for ``async with`` and ``async for``; leaving the block cancels the request."""

    def __init__(
        self,
        engine: Engine,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_event: Callable[["Answer", Event], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._engine = engine
        self._request = engine.submit(prompt_ids, params, lambda event: on_event(self, event))

    def cancel(self) -> None:
        """End the request before the next step."""
        self._engine.cancel(self._request)

    async def __aenter__(self) -> AsyncIterator[Event]:
        return self._each()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _each(self) -> AsyncIterator[Event]:
        while True:
            event = await self.events.get()
            yield event
            if event.finish is not None:
                return
