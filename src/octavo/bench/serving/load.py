"""Requests of a benchmark in a closed or an open loop, and the times of their tokens.

| loop   | a request is sent                              | measures                                                   |
|--------|------------------------------------------------|------------------------------------------------------------|
| closed | when its client's last answer is complete      | throughput with a number of clients                        |
| open   | at a fixed time, independent of other requests | waiting times of users, whom a slow server does not delay  |

Arrivals of an open loop are a Poisson process: gaps are drawn from an exponential distribution, so that requests come
in bursts, like users' requests. The time of a request counts from when it was due, so that a delay in this process is
included (Tene's "coordinated omission").

Times are those of the running event loop.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

__all__ = ["AnswerTimes", "Ask", "Prompt", "closed_loop", "open_loop", "poisson_arrivals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt of a request.

    Attributes:
        ids: token ids, for an engine.
        text: the prompt for servers that take text.
        answer_tokens: number of tokens of the answer.
    """

    ids: tuple[int, ...] = ()
    text: str = ""
    answer_tokens: int


Ask = Callable[[Prompt], AsyncIterator[int]]  # sends a prompt and yields the number of tokens of each piece


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimes:
    """Times of one answer, in seconds.

    Attributes:
        due: time at which the request was to be sent.
        first: time of the first token.
        last: time of the last token.
        tokens: number of tokens.
    """

    due: float
    first: float
    last: float
    tokens: int

    @property
    def latency(self) -> float:
        """Time to the last token."""
        return self.last - self.due

    @property
    def to_first(self) -> float:
        """Time to the first token."""
        return self.first - self.due

    @property
    def a_token(self) -> float | None:
        """Mean time between tokens; None for a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


def poisson_arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """Draw the times at which requests are due, in seconds from the start.

    Args:
        count: number of requests.
        rate: mean number of requests per second.
        seed: seed of the times.

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
    """Send all prompts; each client sends its next one when its last is answered."""
    waiting, now = iter(prompts), asyncio.get_running_loop().time

    async def client() -> list[AnswerTimes]:
        return [await _answered(ask, prompt, now()) for prompt in waiting]

    by_client = await asyncio.gather(*(client() for _ in range(clients)))
    return [answer for answers in by_client for answer in answers]


async def open_loop(ask: Ask, prompts: Sequence[Prompt], arrivals: Sequence[float]) -> list[AnswerTimes]:
    """Send each prompt at its time in ``arrivals``."""
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
