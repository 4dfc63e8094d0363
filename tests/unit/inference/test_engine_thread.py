"""Answers as asyncio wants them, from an engine in a thread of its own."""

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from octavo.errors import ClosedError, QueueFullError
from octavo.inference import Engine, EngineConfig, EngineThread, FinishReason, SamplingParams, engine_thread
from octavo.kernels import native_bindings
from octavo.kernels.threads import count_threads


@pytest.fixture
def thread(byte_runner, byte_tokenizer):
    made = EngineThread(Engine(byte_runner, byte_tokenizer, config=EngineConfig(max_running=3, max_waiting=6)))
    yield made
    assert made.drain(60)


async def tokens_of(thread, prompt, **params):
    async with thread.answer(prompt, SamplingParams(**params)) as events:
        return [event.token async for event in events if event.token is not None]


def test_answers_stream_concurrently(thread):
    async def ask():
        asked = [tokens_of(thread, [n, 2, 3], max_tokens=8, seed=n) for n in range(4)]
        together = await asyncio.gather(*asked)
        return together, [await tokens_of(thread, [n, 2, 3], max_tokens=8, seed=n) for n in range(4)]

    together, alone = asyncio.run(ask())
    assert together == alone
    assert [len(tokens) for tokens in together] == [8] * 4


def test_leaving_the_block_cancels(thread):
    async def ask():
        async with thread.answer([1], SamplingParams(max_tokens=300, temperature=0)) as events:
            async for _ in events:
                break
        return await tokens_of(thread, [1], max_tokens=2)

    assert len(asyncio.run(ask())) == 2
    assert thread.drain(60)
    finished = thread.engine.metrics.finished
    assert (finished[FinishReason.CANCELLED], finished[FinishReason.LENGTH]) == (1, 1)
    assert thread.engine.load.pages_used == 0


def test_closed_event_loop_cancels(thread):
    async def ask():
        return thread.answer([1], SamplingParams(max_tokens=320))

    asyncio.run(ask())
    assert thread.drain(60)
    assert thread.failure is None
    assert sum(thread.engine.metrics.finished.values()) == 1


def test_full_queue_and_closed_engine_raise_at_once(thread):
    async def ask():
        def ask_many():
            for _ in range(300):
                thread.answer([1] * 200, SamplingParams(max_tokens=100))

        with pytest.raises(QueueFullError):
            ask_many()
        thread.engine.close()
        with pytest.raises(ClosedError):
            thread.answer([1], SamplingParams())

    asyncio.run(ask())


def test_loop_is_woken_once_per_step(monkeypatch, byte_runner, byte_tokenizer):
    engine, calls = Engine(byte_runner, byte_tokenizer), []
    begin, own_step = threading.Event(), engine.step
    monkeypatch.setattr(engine, "step", lambda: begin.wait(60) and own_step())

    async def ask():
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def noting(*given):
            calls.append(given)
            return wake(*given)

        monkeypatch.setattr(loop, "call_soon_threadsafe", noting)
        asked = [asyncio.create_task(tokens_of(made, [n, 2, 3], max_tokens=5, seed=n)) for n in range(4)]
        await asyncio.sleep(0)
        begin.set()
        return await asyncio.gather(*asked)

    made = EngineThread(engine)
    assert [len(tokens) for tokens in asyncio.run(ask())] == [5] * 4
    assert made.drain(60)
    handed_out = [given for given in calls if given[0] is engine_thread._hand_out]
    assert [len(events) for _, events in handed_out] == [4] * 5


ENDS_EARLY = """
import asyncio
from tokenizers import Tokenizer, models
from octavo.models import Llama, LlamaConfig
from octavo.inference import Engine, EngineThread, ModelRunner, SamplingParams

shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
runner = ModelRunner(Llama(LlamaConfig(vocab_size=3, max_positions=4096, **shape)))
thread = EngineThread(Engine(runner, Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))))

async def one():
    return thread.answer([1], SamplingParams(max_tokens=4000))

asyncio.run(one())
print("the end")
"""


@pytest.mark.long
def test_process_can_exit_during_an_answer():
    for _ in range(3):
        command = [sys.executable, "-c", ENDS_EARLY]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failed_engine_ends_all_answers(byte_runner, byte_tokenizer, monkeypatch):
    engine = Engine(byte_runner, byte_tokenizer)

    def broken(chunks):
        raise ArithmeticError("the model is gone")

    monkeypatch.setattr(engine, "_read", broken)
    thread = EngineThread(engine)

    async def ask():
        async with thread.answer([1], SamplingParams()) as events:
            return [event async for event in events]

    (last,) = asyncio.run(ask())
    assert (last.finish, last.error) == (FinishReason.ERROR, "the engine failed: the model is gone")
    assert thread.drain(60)
    assert isinstance(thread.failure, ArithmeticError)
    assert engine.load.pages_used == 0


def test_threads_are_released_by_creator_and_when_idle(monkeypatch, byte_runner, byte_tokenizer):
    callers = []
    monkeypatch.setattr(engine_thread, "release_threads", lambda: callers.append(threading.current_thread().name))
    made = EngineThread(Engine(byte_runner, byte_tokenizer))
    assert callers == [threading.current_thread().name]
    asyncio.run(tokens_of(made, [1], max_tokens=4))
    assert made.drain(60)
    assert callers[1:] == ["octavo-engine"]


def test_engine_uses_the_creators_thread_count(monkeypatch, byte_runner, byte_tokenizer):
    threads, seen = torch.get_num_threads(), []
    engine = Engine(byte_runner, byte_tokenizer)
    own_step = engine.step

    def step():
        seen.append(count_threads())
        return own_step()

    monkeypatch.setattr(engine, "step", step)
    torch.set_num_threads(3)
    try:
        made = EngineThread(engine)
        asyncio.run(tokens_of(made, [1], max_tokens=2))
        assert made.drain(60)
    finally:
        torch.set_num_threads(threads)
    assert {*seen} == {3 if native_bindings.why_absent() is None else 0}
