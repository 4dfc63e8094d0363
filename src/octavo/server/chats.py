"""``POST /v1/chat/completions``: next turn of a conversation, rendered by the model's chat template."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.inference import Event
from octavo.inference.sampling import MOST_LOGPROBS
from octavo.inference.text_stream import UNFINISHED
from octavo.server.error_responses import ResponseError
from octavo.server.fields import Boolean, Const, Field, Integer, JsonObject, ListOf, OneOf, String
from octavo.server.operations import EVENTS, JSON, Operation, body_of
from octavo.server.responses import AnswerRequest, finish_reason, respond
from octavo.server.sampling_fields import params_of, sampling_fields
from octavo.server.service import Service

__all__ = ["Chats"]

MAX_TOKENS = 512  # default; the OpenAI API has no limit, but the cache has
MESSAGES, MOST_MESSAGES = "messages", 1000
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # to the template's

# Fields of the OpenAI API that octavo does not implement, with the values that have no effect; others are refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "metadata": ({},),
}
NEUTRAL_OF_A_MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "tool_calls": ([],),
    "function_call": (),
}


class Chats:
    """Chat completion endpoint."""

    def __init__(self, service: Service) -> None:
        self._service, self._body = service, _fields(service)

    def operations(self) -> list[Operation]:
        """Return the endpoint's operation."""
        return [
            Operation(
                method="POST",
                path="/v1/chat/completions",
                run=self.create,
                about="Answer in a conversation",
                body=self._body,
                answers=(JSON, EVENTS),
            )
        ]

    async def create(self, request: Request) -> Response:
        """Answer a chat completion request."""
        service, body = self._service, await body_of(request, self._body)
        service.check_model(body["model"])
        ids = await service.chat_tokens([_plain(message) for message in body[MESSAGES]], field=MESSAGES)
        most, logprobs = self._max_tokens(body, len(ids)), _logprobs(body)
        requests = [
            AnswerRequest(ids, params_of(body, service, choice=choice, max_tokens=most, logprobs=logprobs), MESSAGES)
            for choice in range(body["n"])
        ]
        return await respond(request, service, requests, ChatForm(service, logprobs=body["logprobs"]), body=body)

    def _max_tokens(self, body: dict[str, Any], prompt: int) -> int:
        limit = body["max_tokens"] if body["max_completion_tokens"] is None else body["max_completion_tokens"]
        if limit is not None:
            return int(limit)
        room = self._service.thread.engine.positions - prompt + 1
        return max(1, min(MAX_TOKENS, self._service.max_tokens, room))


class ChatForm:
    """Format of chat completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, *, logprobs: bool) -> None:
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.name}
        self._service, self._has_logprobs = service, logprobs
        self._begun: set[int] = set()

    def pieces(self, index: int, event: Event) -> Iterable[dict[str, Any]]:
        """Return the role with the first event of an answer, then its text and log probabilities."""
        if index not in self._begun:
            self._begun.add(index)
            yield _choice(index, {"role": "assistant", "content": ""})
        has_logprobs = self._has_logprobs and event.token is not None
        logprobs = {"content": [self._logprobs(event)]} if has_logprobs else None
        if event.text or logprobs or event.finish is not None:
            yield _choice(index, {"content": event.text}, logprobs, finish_reason(event))

    def joined(self, index: int, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Join an answer's chunks into one message."""
        text = "".join(piece["delta"]["content"] for piece in pieces)
        logprobs = [token for piece in pieces if piece["logprobs"] for token in piece["logprobs"]["content"]]
        return {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": logprobs} if self._has_logprobs else None,
            "finish_reason": pieces[-1]["finish_reason"],
        }

    def _logprobs(self, event: Event) -> dict[str, Any]:
        assert event.token is not None
        top = [self._token(token, logprob) for token, logprob in event.top]
        return self._token(event.token, event.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._service.text_of(token)
        return {"token": text, "logprob": logprob, "bytes": None if UNFINISHED in text else [*text.encode()]}


def _choice(
    index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _fields(service: Service) -> JsonObject:
    part = JsonObject(
        fields=(
            Field(name="type", kind=String(words=("text",)), required=True),
            Field(name="text", kind=String(), required=True),
        )
    )
    message = JsonObject(
        fields=(
            Field(name="role", kind=String(words=tuple(ROLES)), required=True),
            Field(name="content", kind=OneOf((String(), ListOf(kind=part, most=MOST_MESSAGES))), required=True),
            Field(name="name", kind=String(), about="name of the speaker, for templates that use it"),
            *(Field(name=name, kind=Const(values)) for name, values in NEUTRAL_OF_A_MESSAGE.items()),
        )
    )
    most = Integer(least=1, most=service.max_tokens)
    supported = (
        Field(name=MESSAGES, kind=ListOf(kind=message, most=MOST_MESSAGES), required=True, about="oldest first"),
        Field(
            name="max_tokens",
            kind=most,
            about=f"of the answer; default {MAX_TOKENS}, or fewer if the cache has less room",
        ),
        Field(name="max_completion_tokens", kind=most, about="newer name of max_tokens"),
        Field(name="logprobs", kind=Boolean(), default=False, about="return the log probability of each token"),
        Field(
            name="top_logprobs",
            kind=Integer(least=0, most=MOST_LOGPROBS),
            about="number of likeliest tokens to return with it",
        ),
    )
    neutral = (Field(name=name, kind=Const(values)) for name, values in NEUTRAL.items())
    return JsonObject(fields=(*supported, *neutral, *sampling_fields(service)))


def _logprobs(body: dict[str, Any]) -> int | None:
    top: int | None = body["top_logprobs"]
    if top is not None and not body["logprobs"]:
        raise ResponseError(400, "top_logprobs needs logprobs; set logprobs to true", param="top_logprobs")
    return (top or 0) if body["logprobs"] else None


def _plain(message: dict[str, Any]) -> dict[str, str]:
    """Message in the form that templates take: its text parts joined, and its name if it has one."""
    content, name = message["content"], message["name"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {"role": ROLES[message["role"]], "content": text} | ({} if name is None else {"name": name})
