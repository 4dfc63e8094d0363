"""A thread that steps an engine, and answers as asyncio wants them."""

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Listed
from types import TracebackType

import torch

from octavo.inference.engine import Engine
from octavo.inference.requests import Event
from octavo.inference.sampling import SamplingParams
from octavo.kernels.threads import release_threads

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
        self._told: list[tuple[Answer, Event]] = []  # in this step
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        release_threads()  # of whoever loaded the model
        self._thread.start()
        atexit.register(self._end)  # as Python ends it kills daemon threads, in the middle of C++ too, which aborts

    def answer(self, prompt_ids: Listed[int], params: SamplingParams) -> "Answer":
        """Ask for an answer, from a running event loop; raises what :meth:`octavo.inference.Engine.submit` does."""
        return Answer(self.engine, prompt_ids, params, tell=lambda own, event: self._told.append((own, event)))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait until those taken are answered; False where the time was not enough."""
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
        torch.set_num_threads(self._threads)  # each thread has a number of its own
        try:
            while self.engine.wait_for_work():
                while self.engine.step():
                    self._deliver()
                self._deliver()
                release_threads()
        except BaseException as error:  # a panic of the tokenizer is no Exception
            self.failure = error
            self.engine.fail(f"the engine broke: {error}")
            self._deliver()
            raise  # to the thread's own report

    def _deliver(self) -> None:
        """Wake each event loop once for all that a step told: it would take Python's lock while tokens are chosen."""
        told, self._told = self._told, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Answer, Event]]] = {}
        for answer, event in told:
            by_loop.setdefault(answer.loop, []).append((answer, event))
        for loop, events in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_out, events)
            except RuntimeError:  # the loop was closed, so nobody listens any more
                for answer, _ in events:
                    answer.cancel()


def _hand_out(events: list[tuple["Answer", Event]]) -> None:
    for answer, event in events:
        answer.events.put_nowait(event)


class Answer:
    """The events of one request, for ``async with`` and ``async for``; leaving the block cancels what is left of it."""

    def __init__(
        self,
        engine: Engine,
        prompt_ids: Listed[int],
        params: SamplingParams,
        *,
        tell: Callable[["Answer", Event], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._engine = engine
        self._request = engine.submit(prompt_ids, params, lambda event: tell(self, event))

    def cancel(self) -> None:
        """End it before the next step."""
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
