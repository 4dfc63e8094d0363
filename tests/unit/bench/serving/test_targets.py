"""Servers that answer what they should, and servers that do not."""

import asyncio
import json

import httpx2
import pytest

from octavo.bench.serving import Prompt
from octavo.bench.serving.targets import Api, ask_server, connected, model_name
from octavo.errors import DataError

PROMPT = Prompt(text="some words", answer_tokens=3)
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


def stream(*pieces):
    return "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"


def asked(api, answer, *, status=200):
    """What is yielded, and what was sent."""
    sent = []

    def handle(request):
        sent.append((request.url.path, json.loads(request.content)))
        return httpx2.Response(status, text=answer)

    async def ask():
        async with httpx2.AsyncClient(base_url="http://host", transport=httpx2.MockTransport(handle)) as client:
            return [count async for count in ask_server(client, api, "some-model")(PROMPT)]

    return asyncio.run(ask()), sent[0]


def test_completion_pieces_are_counted():
    pieces = [{"choices": [{"text": text}]} for text in ("a", "", "c")]
    found, (path, body) = asked(Api.COMPLETIONS, stream(*pieces, USAGE))
    assert found == [1, 1, 1]
    assert path == "/v1/completions"
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("some-model", "some words", 3)
    assert body["stream"]
    assert body["ignore_eos"]


def test_usage_overrides_the_count_of_pieces():
    found, _ = asked(Api.COMPLETIONS, stream({"choices": [{"text": "abc"}]}, USAGE))
    assert sum(found) == 3


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}, "none"])
def test_pieces_are_counted_without_usage(usage):
    found, _ = asked(Api.COMPLETIONS, stream({"choices": [{"text": "abc"}], "usage": usage}))
    assert found == [1]


def test_pieces_without_a_token_are_not_counted():
    pieces = [{"choices": [{"text": text}]} for text in ("a", "b", "c", "")]
    found, _ = asked(Api.COMPLETIONS, stream(*pieces, USAGE))
    assert sum(found) == 3


def test_chat_role_is_not_counted():
    pieces = [
        {"choices": [{"delta": delta}]} for delta in ({"role": "assistant"}, {"content": "a"}, {"content": "b"}, {})
    ]
    found, (path, body) = asked(Api.CHAT, stream(*pieces))
    assert (found, path) == ([1, 1], "/v1/chat/completions")
    assert body["messages"] == [{"role": "user", "content": "some words"}]


def test_kserve_events_are_counted():
    found, (path, body) = asked(Api.KSERVE, stream({"text_output": "a"}, {"text_output": "b"}))
    assert (found, path) == ([1, 1], "/v2/models/some-model/generate_stream")
    assert body == {"text_input": "some words", "max_tokens": 3, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ("no such model", 404, "answered 404: no such model"),
        (stream(), 200, "answered without a token"),
        ("data: <html>\n\n", 200, "not a JSON object: '<html>'"),
        ("data: [1]\n\n", 200, "not a JSON object"),
        (stream({"error": {"message": "it broke"}}), 200, "ended with an error: .*it broke"),
    ],
)
def test_invalid_answers_raise(answer, status, words):
    with pytest.raises(DataError, match=words):
        asked(Api.COMPLETIONS, answer, status=status)


def test_missing_server_is_one_sentence():
    """Of two servers the one that is away is named."""

    async def ask():
        own, other = (connected(f"http://127.0.0.1:{port}", key=None, timeout_s=5) for port in (9, 10))
        async with own as client, other:
            await model_name(client)

    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9 did not answer"):
        asyncio.run(ask())


def test_a_server_without_models_is_refused():
    async def ask():
        answer = httpx2.MockTransport(lambda _: httpx2.Response(200, json={"data": []}))
        async with httpx2.AsyncClient(base_url="http://host", transport=answer) as client:
            await model_name(client)

    with pytest.raises(DataError, match="lists no models"):
        asyncio.run(ask())
