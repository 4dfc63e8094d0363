"""Loops and arrivals, on a clock that obeys."""

import asyncio
import statistics

import pytest

from octavo.bench.serving import AnswerTimes, Prompt, closed_loop, open_loop, poisson_arrivals
from tests.unit.bench.serving.virtual_time import run

PROMPTS = [Prompt(answer_tokens=count) for count in (3, 1, 2, 2)]


def server(*, at_once=10**6, first=1.0, each=0.5):
    """Answers so many at once; the first token takes ``first`` seconds, others ``each``."""
    places = asyncio.Semaphore(at_once)

    async def ask(prompt):
        async with places:
            for index in range(prompt.answer_tokens):
                await asyncio.sleep(first if index == 0 else each)
                yield 1

    return ask


def test_closed_loop_client_sends_after_its_answer():
    answers = run(closed_loop(server(), PROMPTS, clients=1))
    assert [(a.due, a.first, a.last, a.tokens) for a in answers] == [
        (0.0, 1.0, 2.0, 3),
        (2.0, 3.0, 3.0, 1),
        (3.0, 4.0, 4.5, 2),
        (4.5, 5.5, 6.0, 2),
    ]
    assert [a.a_token for a in answers] == [0.5, None, 0.5, 0.5]
    assert [a.latency for a in answers] == [2.0, 1.0, 1.5, 1.5]
    assert [a.to_first for a in answers] == [1.0, 1.0, 1.0, 1.0]


def test_closed_loop_clients_are_concurrent():
    answers = run(closed_loop(server(), PROMPTS, clients=2))
    assert sorted((a.due, a.last) for a in answers) == [(0.0, 1.0), (0.0, 2.0), (1.0, 2.5), (2.0, 3.5)]
    assert run(closed_loop(server(), PROMPTS, clients=9))[0] == AnswerTimes(due=0.0, first=1.0, last=2.0, tokens=3)


def test_an_open_loop_does_not_wait_for_a_slow_server():
    """One at once, a second each: what is due every half second waits longer and longer."""
    prompts = [Prompt(answer_tokens=1)] * 4
    answers = run(open_loop(server(at_once=1), prompts, [0.0, 0.5, 1.0, 1.5]))
    assert [a.due for a in answers] == [0.0, 0.5, 1.0, 1.5]
    assert [a.latency for a in answers] == [1.0, 1.5, 2.0, 2.5]


def test_arrivals_are_a_poisson_process_by_seed():
    due = poisson_arrivals(20000, 4.0, seed=1)
    gaps = [late - early for early, late in zip([0.0, *due], due, strict=False)]
    assert due == sorted(due) == poisson_arrivals(20000, 4.0, seed=1) != poisson_arrivals(20000, 4.0, seed=2)
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)  # an exponential distribution's are equal
    in_a_second = [sum(second <= at < second + 1 for at in due) for second in range(200)]
    assert statistics.variance(in_a_second) == pytest.approx(statistics.mean(in_a_second), rel=0.25)
