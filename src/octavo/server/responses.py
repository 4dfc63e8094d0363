"""Responses of the text APIs: one JSON body or server-sent events, in the format of the requested API.

The JSON body is joined from the chunks that a stream would send, so both have the same content.
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
from octavo.server.error_responses import CONTEXT, ResponseError, check_event, error_body
from octavo.server.guard import EXITS
from octavo.server.operations import EVENTS
from octavo.server.service import Service

__all__ = [
    "AnswerRequest",
    "ResponseFormat",
    "event_stream",
    "finish_reason",
    "merge_events",
    "respond",
    "start_answers",
]

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """One requested answer.

    Attributes:
        prompt_ids: token ids of the prompt.
        params: sampling parameters for the engine.
        field: field of the body that holds the prompt; named in errors.
    """

    prompt_ids: list[int]
    params: SamplingParams
    field: str


class ResponseFormat(Protocol):
    """Response format of an API."""

    head: dict[str, Any]  # first fields of every response and chunk
    whole: str  # "object" of a response
    chunk: str  # "object" of a chunk

    def pieces(self, index: int, event: Event) -> Iterable[Choice]:
        """Choices that an event adds to answer ``index``, in the format of chunks."""

    def joined(self, index: int, pieces: Sequence[Choice]) -> Choice:
        """Complete choice, joined from all its pieces."""


async def start_answers(
    request: Request, service: Service, requests: Sequence[AnswerRequest]
) -> list[AsyncIterator[Event]]:
    """Submit answers to the engine; they are cancelled when the request ends for any reason.

    Returns:
        The events of each answer.

    Raises:
        ResponseError: the engine rejects a prompt or its parameters.
        QueueFullError: the engine's queue is full.
        ClosedError: the server is shutting down.
    """
    exits, streams = request.scope[EXITS], []
    for each in requests:
        try:
            streams.append(await exits.enter_async_context(service.thread.answer(each.prompt_ids, each.params)))
        except ConfigError as error:
            code = CONTEXT if isinstance(error, ContextLengthError) else None
            raise ResponseError(400, str(error), param=each.field, code=code) from error
    return streams


async def merge_events(streams: Sequence[AsyncIterator[Event]]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of several answers in order of arrival, each with the index of its answer.

    Raises:
        ResponseError: an answer failed.
    """
    queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def pass_on(index: int, events: AsyncIterator[Event]) -> None:
        async for event in events:
            queue.put_nowait((index, event))

    tasks = [asyncio.create_task(pass_on(index, events)) for index, events in enumerate(streams)]
    unfinished = len(tasks)
    try:
        while unfinished:
            index, event = await queue.get()
            yield index, check_event(event)
            unfinished -= event.finish is not None
    finally:
        for task in tasks:
            task.cancel()


async def respond(
    request: Request, service: Service, requests: Sequence[AnswerRequest], form: ResponseFormat, *, body: dict[str, Any]
) -> Response:
    """Response to a completion or a chat; the ``n`` answers to each prompt are adjacent in ``requests``."""
    streams = await start_answers(request, service, requests)
    if body["stream"]:
        counted = body["stream_options"]["include_usage"]
        return event_stream(_chunks(streams, form, n=body["n"], counted=counted), path=request.url.path)
    pieces: list[list[Choice]] = [[] for _ in requests]
    ends: dict[int, Usage] = {}
    async for index, event in merge_events(streams):
        pieces[index] += form.pieces(index, event)
        if event.usage is not None:
            ends[index] = event.usage
    choices = [form.joined(index, parts) for index, parts in enumerate(pieces)]
    return JSONResponse({**form.head, "object": form.whole, "choices": choices, "usage": _usage(ends, body["n"])})


async def _chunks(
    streams: Sequence[AsyncIterator[Event]], form: ResponseFormat, *, n: int, counted: bool
) -> AsyncIterator[Any]:
    ends: dict[int, Usage] = {}
    head = {**form.head, "object": form.chunk} | ({"usage": None} if counted else {})
    async with aclosing(merge_events(streams)) as events:
        async for index, event in events:
            for choice in form.pieces(index, event):
                yield {**head, "choices": [choice]}
            if event.usage is not None:
                ends[index] = event.usage
    if counted:
        yield {**head, "choices": [], "usage": _usage(ends, n)}
    yield "[DONE]"


def event_stream(values: AsyncIterator[Any], *, path: str) -> StreamingResponse:
    """Stream values as server-sent events: text unchanged, others as JSON; an error becomes the last event."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for value in values:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
                yield f"data: {text}\n\n"
        except ResponseError as error:
            yield f"data: {json.dumps(error_body(error, path))}\n\n"

    return StreamingResponse(lines(), media_type=EVENTS, headers={"Cache-Control": "no-cache"})


def finish_reason(event: Event) -> str | None:
    """``finish_reason`` of the OpenAI API, which has none for a deadline: "length"."""
    if event.finish is None:
        return None
    return "stop" if event.finish is FinishReason.STOP else "length"


def _usage(ends: dict[int, Usage], n: int) -> dict[str, Any]:
    """Token counts of all answers; a prompt counts once for its ``n`` answers."""
    prompts = [usage for index, usage in ends.items() if index % n == 0]
    prompt, answer = sum(each.prompt_tokens for each in prompts), sum(each.answer_tokens for each in ends.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in prompts)},
    }
