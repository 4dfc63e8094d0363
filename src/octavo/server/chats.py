"""``POST /v1/chat/completions``: the next turn of a conversation, written as the model's chat template says."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.inference import Event
from octavo.inference.sampling import MOST_LOGPROBS
from octavo.server.answers import Asked, finish_word, respond
from octavo.server.fields import Field, Flag, ListOf, OneOf, Only, Record, Text, Whole
from octavo.server.operations import EVENTS, JSON, Operation, body_of
from octavo.server.refusals import Refusal
from octavo.server.sampling_fields import params_of, sampling_fields
from octavo.server.service import Service

__all__ = ["Chats"]

MAX_TOKENS = 512  # where a request does not say; the OpenAI API has no number, and a cache has no room for that
MESSAGES, MOST_MESSAGES = "messages", 1000
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # as a template has them
UNFINISHED = "\ufffd"  # what a token decodes to that is no whole character

# What clients send though it asks for nothing: fields of the OpenAI API, and those of their values that change nothing.
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
    """The surface of conversations."""

    def __init__(self, service: Service) -> None:
        self._service, self._body = service, _fields(service)

    def operations(self) -> list[Operation]:
        """Of the surface."""
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
        """Answer a request."""
        service, body = self._service, await body_of(request, self._body)
        service.check_model(body["model"])
        ids = await service.chat_tokens([_plain(own) for own in body[MESSAGES]], field=MESSAGES)
        most, logprobs = self._max_tokens(body, len(ids)), _logprobs(body)
        asked = [
            Asked(ids, params_of(body, service, choice=choice, max_tokens=most, logprobs=logprobs), MESSAGES)
            for choice in range(body["n"])
        ]
        return await respond(request, service, asked, ChatForm(service, told=body["logprobs"]), body=body)

    def _max_tokens(self, body: dict[str, Any], prompt: int) -> int:
        given = body["max_tokens"] if body["max_completion_tokens"] is None else body["max_completion_tokens"]
        if given is not None:
            return int(given)
        room = self._service.thread.engine.positions - prompt + 1
        return max(1, min(MAX_TOKENS, self._service.max_tokens, room))


class ChatForm:
    """How conversations are written."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, *, told: bool) -> None:
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.name}
        self._service, self._told = service, told
        self._begun: set[int] = set()

    def pieces(self, index: int, event: Event) -> Iterable[dict[str, Any]]:
        """First who speaks, then what is said."""
        if index not in self._begun:
            self._begun.add(index)
            yield _choice(index, {"role": "assistant", "content": ""})
        told = self._told and event.token is not None
        logprobs = {"content": [self._scored(event)]} if told else None
        if event.text or logprobs or event.finish is not None:
            yield _choice(index, {"content": event.text}, logprobs, finish_word(event))

    def joined(self, index: int, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One message."""
        text = "".join(piece["delta"]["content"] for piece in pieces)
        scored = [own for piece in pieces if piece["logprobs"] for own in piece["logprobs"]["content"]]
        return {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": scored} if self._told else None,
            "finish_reason": pieces[-1]["finish_reason"],
        }

    def _scored(self, event: Event) -> dict[str, Any]:
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


def _fields(service: Service) -> Record:
    part = Record(
        fields=(
            Field(name="type", kind=Text(words=("text",)), required=True),
            Field(name="text", kind=Text(), required=True),
        )
    )
    message = Record(
        fields=(
            Field(name="role", kind=Text(words=tuple(ROLES)), required=True),
            Field(name="content", kind=OneOf((Text(), ListOf(kind=part, most=MOST_MESSAGES))), required=True),
            Field(name="name", kind=Text(), about="of who speaks, for templates that write it"),
            *(Field(name=name, kind=Only(values)) for name, values in NEUTRAL_OF_A_MESSAGE.items()),
        )
    )
    most = Whole(least=1, most=service.max_tokens)
    own = (
        Field(name=MESSAGES, kind=ListOf(kind=message, most=MOST_MESSAGES), required=True, about="oldest first"),
        Field(name="max_tokens", kind=most, about=f"of the answer; {MAX_TOKENS}, or fewer where there is less room"),
        Field(name="max_completion_tokens", kind=most, about="the newer name of the same"),
        Field(name="logprobs", kind=Flag(), default=False, about="tell how probable each token was"),
        Field(name="top_logprobs", kind=Whole(least=0, most=MOST_LOGPROBS), about="so many likeliest tokens, too"),
    )
    neutral = (Field(name=name, kind=Only(values)) for name, values in NEUTRAL.items())
    return Record(fields=(*own, *neutral, *sampling_fields(service)))


def _logprobs(body: dict[str, Any]) -> int | None:
    top: int | None = body["top_logprobs"]
    if top is not None and not body["logprobs"]:
        raise Refusal(400, "top_logprobs are told with logprobs alone; set logprobs to true", param="top_logprobs")
    return (top or 0) if body["logprobs"] else None


def _plain(message: dict[str, Any]) -> dict[str, str]:
    """A message as templates know it: text in one piece, which may come in parts, and a name where there is one."""
    content, name = message["content"], message["name"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {"role": ROLES[message["role"]], "content": text} | ({} if name is None else {"name": name})
