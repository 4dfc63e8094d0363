"""``/v1/chat/completions`` beside ``/v1/completions`` of the text that the template writes."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from octavo.server import create_app
from tests.unit.server.conftest import PLACE
from tests.unit.server.test_completions import events

PATH = "/v1/chat/completions"
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
WRITTEN = "system: Be brief.\nuser: Hi\nassistant:"


def ask(client, **fields):
    response = client.post(PATH, json={"model": "tiny", "max_tokens": 12, "messages": TALK, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_chat_matches_completion_of_rendered_template(client):
    found = ask(client, seed=3)
    plain = {"model": "tiny", "prompt": WRITTEN, "seed": 3, "max_tokens": 12}
    wanted = client.post("/v1/completions", json=plain).json()
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted["choices"][0]["text"]}
    assert choice["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == len(WRITTEN)


def test_message_parts_are_joined(client):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [TALK[0], {"role": "user", "content": parts}]
    assert ask(client, seed=3, messages=messages)["choices"] == ask(client, seed=3)["choices"]


NEUTRAL: list[dict[str, Any]] = [
    *({"response_format": value} for value in (None, {"type": "text"})),
    *({"store": value} for value in (None, False)),
    *({name: None} for name in ("metadata", "logit_bias", "tools")),
    *({"metadata": {}}, {"logit_bias": {}}, {"tools": []}),
    *({"tool_choice": value} for value in (None, "none", "auto")),
    {"parallel_tool_calls": True},
]


@pytest.mark.parametrize("extra", NEUTRAL, ids=str)
def test_neutral_fields_have_no_effect(client, extra):
    assert ask(client, seed=3, **extra)["choices"] == ask(client, seed=3)["choices"]


def test_answer_of_openai_client_is_valid_as_message(client):
    empty: dict[str, Any] = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
        "function_call": None,
    }
    before = [*TALK, {"role": "assistant", "content": "Hello"}, TALK[1]]
    again = [{"role": "developer", "content": "Be brief."}, TALK[1], {**before[2], **empty}, {**TALK[1], "name": "Ann"}]
    assert ask(client, seed=3, messages=again)["choices"] == ask(client, seed=3, messages=before)["choices"]


def test_name_is_passed_to_the_template(new_service):
    template = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}"
    named = [TALK[0], {**TALK[1], "name": "Ann"}]
    with TestClient(create_app(new_service(template=template)), base_url=PLACE) as client:
        found = ask(client, seed=3, messages=named)
    assert found["usage"]["prompt_tokens"] == len("system: Be brief.\nAnn: Hi\n")


def test_stream_sends_role_then_matches_whole_response(client):
    whole = ask(client, seed=3, n=2, logprobs=True, top_logprobs=2)
    body = {"model": "tiny", "max_tokens": 12, "messages": TALK, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2}
    chunks = [chunk["choices"][0] for chunk in events(client.post(PATH, json=body | {"stream": True}))]
    for wanted in whole["choices"]:
        first, *rest = [choice for choice in chunks if choice["index"] == wanted["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in rest) == wanted["message"]["content"]
        assert rest[-1]["finish_reason"] == wanted["finish_reason"]
        scored = [own for choice in rest if choice["logprobs"] for own in choice["logprobs"]["content"]]
        assert scored == wanted["logprobs"]["content"]
        assert all(len(own["top_logprobs"]) == 2 for own in scored)


def test_default_max_tokens_fits_the_cache(client):
    talk = [{"role": "user", "content": "x" * 200}]
    response = client.post(PATH, json={"model": "tiny", "messages": talk})
    used = response.json()["usage"]
    assert used["total_tokens"] == 321  # the model's positions, and a token that is told and not read


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages must have from 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be one of 'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "must be one of 'text'"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "tokens, and at most 320 are accepted"),
        ({"response_format": {"type": "json_object"}}, 'response_format must be {"type": "text"} or null'),
        ({"store": True}, "store must be false or null, not true; leave it out"),
        ({"metadata": {"a": "b"}}, "metadata must be {} or null"),
        ({"tools": [{"type": "function"}]}, "tools must be [] or null, not a list with entries; leave it out"),
        ({"tool_choice": "required"}, 'tool_choice must be "none" or "auto" or null, not \'required\''),
        ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages[0].refusal must be null"),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name must be text"),
        ({"top_logprobs": 3}, "set logprobs to true"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_requests_get_400(client, fields, says):
    response = client.post(PATH, json={"model": "tiny", "messages": TALK, **fields})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_too_long_conversation_names_messages(client):
    for talk, most in (("x" * 400, 1), ("x" * 200, 200)):
        body = {"model": "tiny", "messages": [{"role": "user", "content": talk}], "max_tokens": most}
        error = client.post(PATH, json=body).json()["error"]
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_chat_without_template_gets_400(new_service):
    with TestClient(create_app(new_service(template=None)), base_url=PLACE) as client:
        response = client.post(PATH, json={"model": "tiny", "messages": TALK})
    assert response.status_code == 400
    assert "has no chat template" in response.json()["error"]["message"]


def test_messages_rejected_by_template_get_400(new_service):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}x"
    with TestClient(create_app(new_service(template=template)), base_url=PLACE) as client:
        response = client.post(PATH, json={"model": "tiny", "messages": TALK})
    assert response.status_code == 400
    assert "no system role here" in response.json()["error"]["message"]
