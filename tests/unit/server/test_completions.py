"""``/v1/completions`` beside the engine, asked without a server, and the runner's own logits."""

import json
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from octavo.engines import RowByRow, convert_as_served, get, model_as
from octavo.inference import Engine, ProfileRunner, SamplingParams
from octavo.models import Llama
from octavo.rl import log_probs
from octavo.server import create_app
from tests.tiny_llama import tiny_llama_config
from tests.unit.server.conftest import PLACE

PATH = "/v1/completions"


def ask(client, **fields):
    response = client.post(PATH, json={"model": "tiny", "max_tokens": 12, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(response):
    """What a stream sends; its last word is [DONE]."""
    blocks = [block for block in response.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def told(byte_runner, byte_tokenizer, prompt, **params):
    """The text of an engine of its own."""
    engine = Engine(byte_runner, byte_tokenizer)
    seen: list[Any] = []
    engine.submit(byte_tokenizer.encode(prompt).ids, SamplingParams(**params), seen.append)
    while engine.step():
        pass
    return "".join(event.text for event in seen), seen[-1].usage


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 4}, {"seed": 4, "top_k": 9, "top_p": 0.5}], ids=str)
def test_text_matches_engine(client, byte_runner, byte_tokenizer, settings):
    found = ask(client, prompt="Sing, goddess", **settings)
    text, usage = told(byte_runner, byte_tokenizer, "Sing, goddess", max_tokens=12, **settings)
    (choice,) = found["choices"]
    assert choice == {"text": text, "index": 0, "logprobs": None, "finish_reason": "length"}
    assert found["object"] == "text_completion"
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (13, usage.answer_tokens)


def test_prompts_as_tokens_or_lists_are_answered_in_order(client, byte_tokenizer):
    ids = {text: byte_tokenizer.encode(text).ids for text in ("one", "another")}
    alone = {text: ask(client, prompt=text, seed=1)["choices"][0]["text"] for text in ids}
    assert ask(client, prompt=ids["one"], seed=1)["choices"][0]["text"] == alone["one"]
    for prompts in (["one", "another"], [ids["one"], ids["another"]]):
        found = ask(client, prompt=prompts, seed=1)
        assert [own["text"] for own in found["choices"]] == [alone["one"], alone["another"]]
        assert [own["index"] for own in found["choices"]] == [0, 1]
        assert found["usage"]["prompt_tokens"] == 10


def test_n_answers_have_different_seeds_and_count_the_prompt_once(client):
    found = ask(client, prompt="one", n=3, seed=5)
    alone = [ask(client, prompt="one", seed=5 + i)["choices"][0]["text"] for i in range(3)]
    assert [own["text"] for own in found["choices"]] == alone
    assert len(set(alone)) == 3
    assert found["usage"]["prompt_tokens"] == 3
    assert found["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}], ids=str)
def test_stream_matches_whole_response(client, extra):
    asked = {"prompt": ["one", "two"], "n": 2, "seed": 9, "temperature": 2, **extra}
    whole = ask(client, **asked)
    body = {"model": "tiny", "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}, **asked}
    *chunks, last = events(client.post(PATH, json=body))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 48)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for wanted in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == wanted["index"]]
        assert "".join(choice["text"] for choice in own) == wanted["text"]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        if "logprobs" in extra:
            lists = [choice["logprobs"]["tokens"] for choice in own if choice["logprobs"]]
            assert [token for tokens in lists for token in tokens] == wanted["logprobs"]["tokens"]


def test_neutral_fields_have_no_effect(client):
    plain = ask(client, prompt="one", seed=2)["choices"]
    neutral: list[dict[str, Any]] = [
        {"logit_bias": {}},
        {"logit_bias": None},
        {"best_of": 1, "suffix": "", "presence_penalty": 0},
    ]
    for extra in neutral:
        assert ask(client, prompt="one", seed=2, **extra)["choices"] == plain


def test_an_answer_ends_before_a_stop_text(client):
    text = ask(client, prompt="one", seed=2, temperature=2, max_tokens=40)["choices"][0]["text"]
    stop = text[10:12]
    (choice,) = ask(client, prompt="one", seed=2, temperature=2, max_tokens=40, stop=[stop, "never there"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_echo_with_logprobs_scores_the_prompt(client, byte_runner, byte_tokenizer):
    """As lm-eval asks for it: the sum over the tokens behind the context is the continuation's."""
    prompt = "Sing, goddess, the anger"
    ids = byte_tokenizer.encode(prompt).ids
    logits = byte_runner(torch.tensor(ids), byte_runner.new_cache(), every=True).double().log_softmax(-1)
    found = ask(client, prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    told = found["choices"][0]["logprobs"]
    assert told["tokens"][:-1] == list(prompt)
    assert told["text_offset"] == list(range(len(ids) + 1))
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    wanted = [float(logits[at, token]) for at, token in enumerate(ids[1:])]
    assert told["token_logprobs"][1:-1] == wanted
    likeliest = [max(top.values()) for top in told["top_logprobs"][1:]]
    assert likeliest == logits.max(-1).values.tolist()
    assert found["choices"][0]["text"].startswith(prompt)


@pytest.mark.parametrize("profile", ["vllm-token", "sglang-block", "te-block"])
def test_log_probabilities_under_a_profile_are_the_trainers(new_service, byte_tokenizer, profile):
    """Of prompts and answers of two requests at once, through JSON, to the last bit."""
    model = Llama(tiny_llama_config(vocab_size=256, hidden_size=48), seed=3)
    runner, engine = ProfileRunner(model, profile), model_as(model, get(profile))
    service = new_service(runner=runner, cache_format=runner.cache_format)
    prompts = [byte_tokenizer.encode(text).ids for text in ("Sing, goddess, the anger", "of Peleus' son")]
    with TestClient(create_app(service), base_url=PLACE) as client:
        found = ask(client, prompt=prompts, echo=True, logprobs=0, max_tokens=5, temperature=0)
    context = convert_as_served(model, get(profile))
    for choice, prompt in zip(found["choices"], prompts, strict=True):
        ids = torch.tensor([prompt])
        with RowByRow():
            for _ in range(5):
                ids = torch.cat([ids, engine(ids)[:, -1:].argmax(-1)], dim=1)
            with context:
                wanted = log_probs(model.train(), ids)[0].tolist()
        assert choice["logprobs"]["token_logprobs"] == [None, *wanted]


@pytest.mark.parametrize("prompt", ["a€b", "ö😀😀 x", "plain"])
def test_text_offset_is_the_start_of_the_character(client, byte_tokenizer, prompt):
    told = ask(client, prompt=prompt, echo=True, logprobs=0, max_tokens=1, temperature=0)["choices"][0]
    wanted = [at for at, character in enumerate(prompt) for _ in character.encode()]
    assert told["logprobs"]["text_offset"] == [*wanted, len(prompt)]
    assert told["logprobs"]["tokens"][0] == prompt[0] or not prompt.isascii()


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "gpt-9"}, 404, "the model 'gpt-9' is not served here; 'tiny' is"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "prompt must have from 1"),
        ({"prompt": "x" * 400}, 400, "the prompt has 400 tokens, and at most 320 are accepted"),
        ({"prompt": "x" * 200, "max_tokens": 200}, 400, "need 399 positions"),
        ({"prompt": [1, 256]}, 400, "whole number from 0 to 255, not 256"),
        ({"prompt": ["x"] * 9, "n": 2}, 400, "exceed the limit of 16 answers"),
        ({"max_tokens": 10**9}, 400, "max_tokens must be a whole number from 1 to 300"),
        ({"max_tokens": "9"}, 400, "max_tokens must be a whole number"),
        ({"temperature": -1}, 400, "temperature must be a number from 0 to 2"),
        ({"stop": [""]}, 400, "stop"),
        ({"tools": []}, 400, "tools is not a known field"),
        ({"logit_bias": {"50": 1}}, 400, "logit_bias must be {} or null, not an object with entries; leave it out"),
        ({"presence_penalty": 1}, 400, "presence_penalty"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_requests_get_openai_errors(client, fields, status, says):
    response = client.post(PATH, json={"model": "tiny", "prompt": "x", **fields})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("token", [-1, 256, 1e300, True, 1.5])
@pytest.mark.parametrize("prompt", [lambda token: [token], lambda token: [[1, token]]], ids=["one", "several"])
def test_errors_of_token_prompts_name_tokens(client, token, prompt):
    response = client.post(PATH, json={"model": "tiny", "prompt": prompt(token)})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "must be a whole number from 0 to 255" in error["message"]
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({}, "prompt must be text, not an object"),
        ([], "prompt must have from 1 to 16 entries"),
        ([None], "prompt[0] must be text, not null"),
        (["x", 1], "prompt[1] must be text, not 1"),
        ([[]], "prompt[0] must have from 1 to 320 entries"),
        ([1, "x"], "prompt[1] must be a whole number from 0 to 255, not 'x'"),
        ([["x"]], "prompt[0][0] must be a whole number from 0 to 255, not 'x'"),
    ],
    ids=str,
)
def test_prompt_errors_follow_the_best_fitting_type(client, prompt, says):
    assert says in client.post(PATH, json={"model": "tiny", "prompt": prompt}).json()["error"]["message"]


def test_too_long_prompts_have_one_message(client):
    """Whether they come as text, as themselves, or in a list of prompts; and those of an answer with the same code."""
    told = [
        client.post(PATH, json={"model": "tiny", "prompt": prompt}).json()["error"]
        for prompt in ("x" * 321, [1] * 321, ["x" * 321], [[1] * 321])
    ]
    assert told == [told[0]] * 4
    assert (told[0]["param"], told[0]["code"]) == ("prompt", "context_length_exceeded")
    both = client.post(PATH, json={"model": "tiny", "prompt": "x" * 200, "max_tokens": 200}).json()["error"]
    assert (both["param"], both["code"]) == ("prompt", "context_length_exceeded")
    none = client.post(PATH, json={"model": "tiny", "prompt": ""}).json()["error"]
    assert (none["param"], none["code"]) == ("prompt", None)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is not JSON"),
        (b"\xff\xfe{}", "the body is not UTF-8 at byte 0"),
        (b'{"model": "tiny", "prompt": "\xed\xa0\x80"}', "the body is not UTF-8 at byte 29"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "NaN is no number"),
        (b'"text"', "the body must be a JSON object"),
    ],
    ids=lambda value: str(value[:40]),
)
def test_invalid_bodies_get_400(client, body, says):
    response = client.post(PATH, content=body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
