"""Thread pools with bounded queues for work on prompts, such as tokenizing.

Tokenizing runs in compiled code that cannot be interrupted. A request whose client disconnected therefore counts as
running, here and among the server's requests, until its work ends; waiting work is dropped at once.

| pool      | threads | reason                                                           |
|-----------|---------|------------------------------------------------------------------|
| rendering | 1       | a chat template has one process                                  |
| short     | 2       | prompts of up to ``SHORT`` characters never wait for long ones   |
| long      | 1       | tokenizing a long prompt takes 50 times its size in memory       |
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from octavo.server.error_responses import ResponseError

__all__ = ["BoundedThreadPool", "ThreadPools"]

T = TypeVar("T")
SHORT = 2**14  # characters, which take about 10 ms
WAITING = 2**22  # characters that may wait or run in one pool
WAIT_S = 10.0
STUCK_S = 30.0  # longer than any prompt takes


class BoundedThreadPool:
    """Thread pool with a bounded queue.

    Args:
        work: name of the work, for errors and thread names.
        threads: work running at once.
    """

    def __init__(self, work: str, threads: int) -> None:
        self._work, self._turns = work, asyncio.Semaphore(threads)
        self._characters = self._texts = 0
        self._begun: dict[threading.Thread, float] = {}

    @property
    def is_busy(self) -> bool:
        """True while a text is waiting or in work."""
        return self._texts > 0

    @property
    def is_stuck(self) -> bool:
        """True if some work has been running longer than ``STUCK_S``."""
        return any(time.monotonic() - begun > STUCK_S for begun in self._begun.values())

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """Run ``work`` on a text of ``size`` characters and return its result.

        Raises:
            ResponseError: 429 if the queue is full, 503 if the work waited too long.
        """
        if self._characters and self._characters + size > WAITING:
            raise self._overload(
                429, f"{self._characters} characters are waiting for {self._work}, of at most {WAITING}"
            )
        self._characters += size
        self._texts += 1
        try:
            await self._take_turn()
            try:
                return await self._result(work)
            finally:
                self._turns.release()
        finally:
            self._characters -= size
            self._texts -= 1

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise self._overload(503, f"the request waited {WAIT_S:g} s for {self._work}") from None

    async def _result(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread and wait for it to end even when cancelled."""
        done: Future[T] = Future()
        thread = threading.Thread(target=_do, args=(work, done), name=f"octavo-{self._work}", daemon=True)
        self._begun[thread] = time.monotonic()
        thread.start()
        result = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            await asyncio.wait([result])
            result.exception()  # retrieve it, or asyncio logs it although the client is gone
            raise
        finally:
            del self._begun[thread]

    def _overload(self, status: int, reason: str) -> ResponseError:
        return ResponseError(status, f"{reason}; try again", code="rate_limit_exceeded", headers={"Retry-After": "1"})


def _do(work: Callable[[], T], done: "Future[T]") -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 -- passed to the request; a tokenizer's panic is not an Exception
        done.set_exception(error)


@dataclass(frozen=True, slots=True)
class ThreadPools:
    """Thread pools of one server."""

    rendering: BoundedThreadPool = field(default_factory=lambda: BoundedThreadPool("rendering", 1))
    short: BoundedThreadPool = field(default_factory=lambda: BoundedThreadPool("tokenising", 2))
    long: BoundedThreadPool = field(default_factory=lambda: BoundedThreadPool("tokenising", 1))

    @property
    def are_busy(self) -> bool:
        """True while a pool is busy."""
        return any(pool.is_busy for pool in (self.rendering, self.short, self.long))

    @property
    def are_stuck(self) -> bool:
        """True if a pool is stuck."""
        return any(pool.is_stuck for pool in (self.rendering, self.short, self.long))

    def of(self, size: int) -> BoundedThreadPool:
        """Pool that tokenizes a text of ``size`` characters."""
        return self.short if size <= SHORT else self.long
