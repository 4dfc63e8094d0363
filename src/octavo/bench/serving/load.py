"""Requests on a server's behalf, and when their tokens came.

| loop   | a request is sent                              | what it shows                                              |
|--------|------------------------------------------------|------------------------------------------------------------|
| closed | when its client's last answer is complete      | throughput with so many clients                            |
| open   | at its own time, whatever else is going on     | how long users wait: a slow server does not slow them down |

Arrivals of an open loop are a Poisson process: gaps are drawn from an exponential distribution, so that requests come
in bursts, as users' do. A request's time counts from when it was due, so that what this process itself is late with is
not hidden (Tene's "coordinated omission").

Times are those of the running event loop.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

__all__ = ["AnswerTimes", "Ask", "Prompt", "closed_loop", "open_loop", "poisson_arrivals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request.

    Attributes:
        ids: the prompt's tokens, where a tokenizer is at hand.
        text: the prompt for servers that take text.
        answer_tokens: how many to answer with.
    """

    ids: tuple[int, ...] = ()
    text: str = ""
    answer_tokens: int


Ask = Callable[[Prompt], AsyncIterator[int]]  # yields, as they come, how many tokens came


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimes:
    """When one request's tokens came; seconds.

    Attributes:
        due: when it was to be sent.
        first: when its first token came.
        last: when its last one did.
        tokens: how many there were.
    """

    due: float
    first: float
    last: float
    tokens: int

    @property
    def latency(self) -> float:
        """To the last token."""
        return self.last - self.due

    @property
    def to_first(self) -> float:
        """To the first token."""
        return self.first - self.due

    @property
    def a_token(self) -> float | None:
        """From one token to the next, on average; None of a single one."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


def poisson_arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """When so many requests are due, in seconds from the start.

    Args:
        count: how many.
        rate: requests a second, on average.
        seed: decides all of them.

    Example:
        >>> poisson_arrivals(3, 2.0, seed=0) == poisson_arrivals(3, 2.0, seed=0)
        True
    """
    draw, now, due = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        due.append(now)
    return due


async def closed_loop(ask: Ask, prompts: Sequence[Prompt], *, clients: int) -> list[AnswerTimes]:
    """Ask everything; each of so many clients sends its next request when its last is answered."""
    waiting, now = iter(prompts), asyncio.get_running_loop().time

    async def client() -> list[AnswerTimes]:
        return [await _answered(ask, prompt, now()) for prompt in waiting]

    found = await asyncio.gather(*(client() for _ in range(clients)))
    return [answer for answers in found for answer in answers]


async def open_loop(ask: Ask, prompts: Sequence[Prompt], arrivals: Sequence[float]) -> list[AnswerTimes]:
    """Ask everything, each prompt at its own time."""
    start = asyncio.get_running_loop().time()

    async def one(prompt: Prompt, due: float) -> AnswerTimes:
        await asyncio.sleep(start + due - asyncio.get_running_loop().time())
        return await _answered(ask, prompt, start + due)

    return list(await asyncio.gather(*map(one, prompts, arrivals)))


async def _answered(ask: Ask, prompt: Prompt, due: float) -> AnswerTimes:
    now, times, tokens = asyncio.get_running_loop().time, [], 0
    async for count in ask(prompt):
        times.append(now())
        tokens += count
    return AnswerTimes(due=due, first=times[0], last=times[-1], tokens=tokens)
