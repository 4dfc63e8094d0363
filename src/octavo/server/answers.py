"""From a request's prompts to its response: whole or as server-sent events, in the form of the API that was asked.

The pieces of a stream are what the whole answer is put together from, so that both say the same.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from octavo.errors import ConfigError, ContextLengthError
from octavo.inference import Event, FinishReason, SamplingParams, Usage
from octavo.server.guard import EXITS
from octavo.server.operations import EVENTS
from octavo.server.refusals import CONTEXT, Refusal, check_event, refusal_body
from octavo.server.service import Service

__all__ = ["Asked", "Form", "finish_word", "merged", "respond", "server_sent", "started"]

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer that is wanted.

    Attributes:
        prompt_ids: its prompt.
        params: what is asked of the engine.
        field: of the body, that the prompt is from.
    """

    prompt_ids: list[int]
    params: SamplingParams
    field: str


class Form(Protocol):
    """How an API writes answers."""

    head: dict[str, Any]  # what every response and every chunk begins with
    whole: str  # the word for a response
    chunk: str  # the word for a chunk

    def pieces(self, index: int, event: Event) -> Iterable[Choice]:
        """What an event adds to an answer, as chunks have it."""

    def joined(self, index: int, pieces: Sequence[Choice]) -> Choice:
        """An answer whose pieces are all there."""


async def started(request: Request, service: Service, asked: Sequence[Asked]) -> list[AsyncIterator[Event]]:
    """The events of all answers; they end with the request, whoever ends it.

    Raises:
        Refusal: the engine cannot answer one of them.
        QueueFullError: too many wait already.
        ClosedError: the server is shutting down.
    """
    exits, streams = request.scope[EXITS], []
    for one in asked:
        try:
            streams.append(await exits.enter_async_context(service.thread.answer(one.prompt_ids, one.params)))
        except ConfigError as error:
            code = CONTEXT if isinstance(error, ContextLengthError) else None
            raise Refusal(400, str(error), param=one.field, code=code) from error
    return streams


async def merged(streams: Sequence[AsyncIterator[Event]]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of several answers as they come, each with the number of its answer.

    Raises:
        Refusal: an answer broke.
    """
    queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def pass_on(index: int, events: AsyncIterator[Event]) -> None:
        async for event in events:
            queue.put_nowait((index, event))

    tasks = [asyncio.create_task(pass_on(index, events)) for index, events in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            index, event = await queue.get()
            yield index, check_event(event)
            left -= event.finish is not None
    finally:
        for task in tasks:
            task.cancel()


async def respond(
    request: Request, service: Service, asked: Sequence[Asked], form: Form, *, body: dict[str, Any]
) -> Response:
    """The response to a completion or a chat, of which each prompt has ``n`` answers after each other."""
    streams = await started(request, service, asked)
    if body["stream"]:
        counted = body["stream_options"]["include_usage"]
        return server_sent(_chunks(streams, form, n=body["n"], counted=counted), path=request.url.path)
    pieces: list[list[Choice]] = [[] for _ in asked]
    ends: dict[int, Usage] = {}
    async for index, event in merged(streams):
        pieces[index] += form.pieces(index, event)
        if event.usage is not None:
            ends[index] = event.usage
    choices = [form.joined(index, own) for index, own in enumerate(pieces)]
    return JSONResponse({**form.head, "object": form.whole, "choices": choices, "usage": _usage(ends, body["n"])})


async def _chunks(streams: Sequence[AsyncIterator[Event]], form: Form, *, n: int, counted: bool) -> AsyncIterator[Any]:
    ends: dict[int, Usage] = {}
    head = {**form.head, "object": form.chunk} | ({"usage": None} if counted else {})
    async with aclosing(merged(streams)) as events:
        async for index, event in events:
            for choice in form.pieces(index, event):
                yield {**head, "choices": [choice]}
            if event.usage is not None:
                ends[index] = event.usage
    if counted:
        yield {**head, "choices": [], "usage": _usage(ends, n)}
    yield "[DONE]"


def server_sent(values: AsyncIterator[Any], *, path: str) -> StreamingResponse:
    """Values as events: JSON, or a text as it is. One that cannot be had is the last, an error."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for value in values:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
                yield f"data: {text}\n\n"
        except Refusal as refusal:
            yield f"data: {json.dumps(refusal_body(refusal, path))}\n\n"

    return StreamingResponse(lines(), media_type=EVENTS, headers={"Cache-Control": "no-cache"})


def finish_word(event: Event) -> str | None:
    """Why an answer ended, in the OpenAI API's words, which know no deadline."""
    if event.finish is None:
        return None
    return "stop" if event.finish is FinishReason.STOP else "length"


def _usage(ends: dict[int, Usage], n: int) -> dict[str, Any]:
    """Of all answers; a prompt counts once, however many answers it has."""
    prompts = [usage for index, usage in ends.items() if index % n == 0]
    prompt, answer = sum(own.prompt_tokens for own in prompts), sum(own.answer_tokens for own in ends.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(own.reused_tokens for own in prompts)},
    }
