"""Each of many requests is what it is alone; pages, places and events are accounted for, whoever comes and goes."""

import random
import threading
from collections import deque
from typing import Any

import pytest
import torch

from octavo.errors import ClosedError, ConfigError, QueueFullError
from octavo.inference import Engine, EngineConfig, FinishReason, ModelRunner, SamplingParams, generate
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config

TEXT = "Sing, goddess, the anger of Peleus' son Achilles and its devastation, which put pains thousandfold upon the"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def new_engine(byte_runner, byte_tokenizer):
    def make(**settings):
        clock = settings.pop("clock", Clock())
        ends = settings.pop("end_ids", ())
        return Engine(byte_runner, byte_tokenizer, end_ids=ends, clock=clock, config=EngineConfig(**settings))

    return make


def ids_of(text):
    return [byte % 256 for byte in text.encode()]


def run(engine, steps=10**6):
    while steps and engine.step():
        steps -= 1


def tokens_of(events):
    return [event.token for event in events if event.token is not None]


def answer(engine, prompt, params):
    events: list[Any] = []
    engine.submit(prompt, params, events.append)
    run(engine)
    return events


def any_request(chance):
    """Prompts that often begin alike, and settings of all kinds."""
    start = TEXT if chance.random() < 0.6 else TEXT[::-1]
    prompt = ids_of((start * 3)[: chance.choice([1, 5, 63, 64, 65, 128, 129, 200])])
    prompt += [chance.randrange(256) for _ in range(chance.randrange(3))]
    logprobs = chance.choice([None, 2])
    params = SamplingParams(
        max_tokens=chance.choice([1, 2, 9, 70]),
        temperature=chance.choice([0.0, 0.7, 3.0]),
        top_k=chance.choice([None, 50]),
        top_p=chance.choice([1.0, 0.9]),
        min_p=chance.choice([0.0, 0.01]),
        seed=chance.randrange(100),
        logprobs=logprobs,
        prompt_logprobs=logprobs is not None and chance.random() < 0.5,
        stop=chance.choice([(), ("e", "xy")]),
    )
    return prompt, params


@pytest.mark.parametrize("seed", range(3))
def test_answers_match_answers_alone(new_engine, seed):
    chance = random.Random(seed)
    engine = new_engine(max_running=5, step_rows=chance.choice([5, 40, 300]), cache_positions=64 * 14)
    requests = [any_request(chance) for _ in range(24)]
    told: list[Any] = [[] for _ in requests]
    for (prompt, params), events in zip(requests, told, strict=True):
        engine.submit(prompt, params, events.append)
        run(engine, chance.randrange(6))
    run(engine)
    assert engine.load.pages_used == engine.load.running == engine.load.waiting == 0
    assert engine.metrics.reused_tokens > 0
    for (prompt, params), events in zip(requests, told, strict=True):
        alone = answer(new_engine(max_running=1, step_rows=999, cache_positions=320), prompt, params)
        assert [(e.token, e.logprob, e.top, e.text, e.finish) for e in events] == [
            (e.token, e.logprob, e.top, e.text, e.finish) for e in alone
        ]


def test_greedy_answer_matches_runner(new_engine, byte_runner):
    prompt = ids_of(TEXT)
    wanted = list(generate(byte_runner, prompt, max_new_tokens=20, temperature=0))
    events = answer(new_engine(), prompt, SamplingParams(max_tokens=20, temperature=0))
    assert tokens_of(events) == wanted
    generator = torch.Generator().manual_seed(4)
    wanted = list(generate(byte_runner, prompt, max_new_tokens=20, temperature=0.8, top_k=40, generator=generator))
    params = SamplingParams(max_tokens=20, temperature=0.8, top_k=40, seed=4)
    assert tokens_of(answer(new_engine(), prompt, params)) == wanted


@pytest.mark.parametrize("step_rows", [16, 40, 500])
def test_prompt_logprobs_match_model(new_engine, byte_runner, step_rows):
    prompt = ids_of(TEXT[:100])
    engine = new_engine(step_rows=step_rows)
    answer(engine, prompt, SamplingParams(max_tokens=1))  # its pages are there, and not taken
    events = answer(engine, prompt, SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=True))
    with torch.no_grad():
        logits = byte_runner(torch.tensor(prompt), byte_runner.new_cache(), every=True).double()
    wanted = logits.log_softmax(-1)
    first, *others = events
    assert [own.token for own in first.prompt] == prompt[1:]
    assert [own.logprob for own in first.prompt] == [float(wanted[at, t]) for at, t in enumerate(prompt[1:])]
    assert [own.top[0][0] for own in first.prompt] == logits[:-1].argmax(-1).tolist()
    assert not any(event.prompt for event in others)
    assert events[-1].usage.reused_tokens == 0


def test_next_turn_reuses_pages(new_engine):
    engine, params = new_engine(), SamplingParams(max_tokens=60, temperature=0)
    first = answer(engine, ids_of(TEXT), params)
    assert first[-1].usage.reused_tokens == 0
    prompt = [*ids_of(TEXT), *tokens_of(first), 65]
    again = answer(engine, prompt, params)
    assert again[-1].usage.reused_tokens == 128
    fresh = answer(new_engine(), prompt, params)
    assert (tokens_of(again), fresh[-1].usage.reused_tokens) == (tokens_of(fresh), 0)
    assert answer(engine, prompt[:128], params)[-1].usage.reused_tokens == 64, "the last token has to be read"


def test_waiting_request_reuses_pages_filled_meanwhile(new_engine):
    """It is asked before every step what it could share, and the answer changes."""
    engine = new_engine(cache_positions=192)
    told: tuple[list[Any], list[Any]] = ([], [])
    for events in told:
        engine.submit(ids_of((TEXT * 2)[:150]), SamplingParams(max_tokens=20, temperature=0), events.append)
    run(engine, steps=3)
    assert (engine.load.running, engine.load.waiting) == (1, 1)
    run(engine)
    assert [events[-1].usage.reused_tokens for events in told] == [0, 128]
    assert tokens_of(told[0]) == tokens_of(told[1])


def test_random_requests_release_all_pages(new_engine):
    chance, clock = random.Random(5), Clock()
    engine = new_engine(max_running=3, max_waiting=6, step_rows=64, cache_positions=64 * 9, clock=clock)
    held: list[Any] = []
    told: list[Any] = []
    refused = 0
    for _ in range(60):
        prompt, params = any_request(chance)
        try:
            told.append([])
            held.append(engine.submit(prompt, params, told[-1].append))
        except QueueFullError:
            told.pop()
            refused += 1
        if held and chance.random() < 0.3:
            engine.cancel(chance.choice(held))
        run(engine, chance.randrange(12))
        running = engine.load.running
        assert engine.load.pages_used <= 9
        assert running <= 3
        assert engine.load.waiting <= 6
    run(engine)
    metrics = engine.metrics
    assert (engine.load.pages_used, engine.load.waiting, engine.load.running) == (0, 0, 0)
    assert refused == metrics.refused > 0
    assert metrics.submitted == sum(metrics.finished.values()) == len(told)
    assert metrics.finished[FinishReason.CANCELLED] > 0
    assert all([e.finish is not None for e in events].index(True) == len(events) - 1 for events in told)
    assert metrics.answer_tokens == sum(e.usage.answer_tokens for events in told for e in events[-1:])
    assert metrics.first_token_s.count + metrics.token_s.count == metrics.answer_tokens


def test_full_queue_raises_with_retry_time(new_engine):
    clock = Clock()
    engine = new_engine(max_running=1, max_waiting=2, clock=clock, step_rows=8)
    params = SamplingParams(max_tokens=4)
    engine.submit([1], params, lambda _: None)
    engine.submit([1], params, lambda _: None)
    with pytest.raises(QueueFullError, match="the queue is full with 2 requests; try again in 1 s"):
        engine.submit([1], params, lambda _: None)
    clock.now = 30.0
    run(engine)
    for _ in range(2):
        engine.submit([1], params, lambda _: None)
    with pytest.raises(QueueFullError) as refused:
        engine.submit([1], params, lambda _: None)
    assert refused.value.retry_after_s == 30
    assert engine.metrics.refused == 2


def test_requests_start_in_order_of_arrival(new_engine):
    engine, order = new_engine(max_running=3, cache_positions=64 * 3, step_rows=8), []
    for name, length in (("two pages", 100), ("two more", 101), ("one", 3)):
        engine.submit(
            [7] * length, SamplingParams(max_tokens=2, temperature=0), lambda e, name=name: order.append(name)
        )
    engine.step()
    assert (engine.load.running, engine.load.waiting) == (1, 2)
    run(engine)
    assert list(dict.fromkeys(order)) == ["two pages", "two more", "one"]


def test_starting_request_is_always_counted_in_load(new_engine):
    """The load includes a request that has left the queue and is not yet in the batch."""
    engine, seen = new_engine(), []
    looking = threading.Thread(target=lambda: seen.append(engine.load))

    class Watched(deque):
        def popleft(self):
            request = super().popleft()
            looking.start()
            looking.join(0.2)  # it has to wait until the request runs
            return request

    engine._waiting = Watched()
    engine.submit([1, 2], SamplingParams(max_tokens=3), lambda _: None)
    engine.step()
    looking.join()
    assert (seen[0].waiting, seen[0].running) == (0, 1)
    run(engine)


def test_deadline_ends_running_and_waiting_requests(new_engine):
    clock = Clock()
    told: list[Any] = [[], []]
    engine = new_engine(max_running=1, step_rows=16, clock=clock)
    for events in told:
        engine.submit([1, 2], SamplingParams(max_tokens=99, deadline_s=5.0), events.append)
    engine.step()
    engine.step()
    clock.now = 5.0
    assert not engine.step()
    assert [events[-1].finish for events in told] == [FinishReason.DEADLINE] * 2
    assert [len(tokens_of(events)) for events in told] == [2, 0]


def test_all_can_be_cancelled_at_once(new_engine):
    engine = new_engine(max_running=2)
    told: list[Any] = [[] for _ in range(4)]
    for events in told:
        engine.submit([1, 2], SamplingParams(max_tokens=50), events.append)
    run(engine, 3)
    engine.cancel_all()
    run(engine)
    assert [events[-1].finish for events in told] == [FinishReason.CANCELLED] * 4
    assert engine.load.pages_used == 0


def test_end_token_ends_the_answer_without_an_event(new_engine):
    params: dict[str, Any] = {"max_tokens": 9, "temperature": 0.0}
    prompt = ids_of(TEXT)
    whole = tokens_of(answer(new_engine(), prompt, SamplingParams(**params)))
    end = whole[4]
    cut = answer(new_engine(end_ids=[end]), prompt, SamplingParams(**params))
    assert tokens_of(cut) == whole[: whole.index(end)]
    assert (cut[-1].finish, cut[-1].usage.answer_tokens) == (FinishReason.STOP, whole.index(end))
    asked = answer(new_engine(), prompt, SamplingParams(stop_ids=(end,), **params))
    assert tokens_of(asked) == tokens_of(cut)
    on = answer(new_engine(end_ids=[end]), prompt, SamplingParams(ignore_end=True, **params))
    assert tokens_of(on) == whole
    assert on[-1].finish is FinishReason.LENGTH


def test_a_stop_text_ends_an_answer_before_it(new_engine, byte_tokenizer):
    params: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 1}
    whole = answer(new_engine(), ids_of(TEXT), SamplingParams(**params))
    text = "".join(event.text for event in whole)
    plain = next(text[i : i + 2] for i in range(8, len(text)) if text[i : i + 2].isascii())
    cut = answer(new_engine(), ids_of(TEXT), SamplingParams(stop=(plain,), **params))
    assert "".join(event.text for event in cut) == text[: text.index(plain)]
    assert cut[-1].finish is FinishReason.STOP


def test_request_with_nonfinite_logits_ends_alone(byte_tokenizer):
    config = tiny_llama_config(vocab_size=256, num_layers=1, num_heads=2, num_kv_heads=1)
    model = Llama(config)
    model.model.embed_tokens.weight.data[9] = torch.nan
    told: list[Any] = [[], []]
    engine = Engine(ModelRunner(model), byte_tokenizer)
    engine.submit([1, 9], SamplingParams(max_tokens=5), told[0].append)
    engine.submit([1, 2], SamplingParams(max_tokens=5, temperature=0), told[1].append)
    run(engine)
    assert told[0][-1].finish is FinishReason.ERROR
    assert "largest logit is nan" in told[0][-1].error
    assert engine.load.pages_used == 0
    lone: list[Any] = []
    fresh = Engine(ModelRunner(model), byte_tokenizer)
    fresh.submit([1, 2], SamplingParams(max_tokens=5, temperature=0), lone.append)
    run(fresh)
    assert tokens_of(told[1]) == tokens_of(lone)


@pytest.mark.parametrize(
    ("prompt", "most", "says"),
    [
        ([], 1, "the prompt is empty"),
        ([256], 1, "token ids must be integers from 0 to 255"),
        ([-1], 1, "token ids must be integers"),
        ([1.0], 1, "token ids must be integers"),
        ([1] * 300, 22, "need 321 positions, and there are 320; shorten the prompt or lower max_tokens"),
        ([1], 10**9, "need 1000000000 positions"),
    ],
    ids=str,
)
def test_requests_that_cannot_be_answered_are_refused_at_once(new_engine, prompt, most, says):
    engine = new_engine(max_running=2)
    with pytest.raises(ConfigError, match=says):
        engine.submit(prompt, SamplingParams(max_tokens=most), lambda _: None)
    with pytest.raises(ConfigError, match="need 129 positions, and there are 128"):
        new_engine(cache_positions=100).submit([1] * 120, SamplingParams(max_tokens=10), lambda _: None)
    assert engine.load.waiting == 0


def test_closed_engine_finishes_accepted_requests(new_engine):
    events: list[Any] = []
    engine = new_engine()
    engine.submit([1], SamplingParams(max_tokens=3), events.append)
    engine.close()
    with pytest.raises(ClosedError, match="accepts no requests"):
        engine.submit([1], SamplingParams(), lambda _: None)
    assert engine.wait_for_work()
    run(engine)
    assert not engine.wait_for_work()
    assert len(tokens_of(events)) == 3


def test_a_configuration_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="max_running must be a whole number"):
        EngineConfig(max_running=0)
    with pytest.raises(ConfigError, match="step_rows must be at least max_running, 5, not 4"):
        EngineConfig(max_running=5, step_rows=4)
