"""Middleware that checks every request before the application runs and watches its connection afterwards.

1. API key, compared in constant time; health checks and the chat page need none. Without a configured key, requests of
   other sites' web pages are refused (origins.py).
2. Number of requests in progress. A request counts until the last part of its answer is ready to be sent.
3. Size and arrival time of the body. Only a complete body is passed on.
4. Disconnection: when the client disconnects, the work is cancelled, and closing the request's exit stack ends its
   answers in the engine. A client that does not read a part of the answer in time is disconnected.
5. Shutdown of the server: a request without an answer yet is refused in the format of its protocol.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.error_responses import CLOSE, ResponseError, error_response
from octavo.server.limits import Limits
from octavo.server.origins import check_origin

__all__ = ["EXITS", "OPEN_PATHS", "Guard"]

EXITS = "octavo.exits"  # key in a request's scope of the exit stack that is closed after the request
OPEN_PATHS = ("/", "/health", "/v2/health/live", "/v2/health/ready")
BEARER = "bearer "
ENDED = ResponseError(503, "the server ended before it answered; use another server", code="draining", headers=CLOSE)


class Guard:
    """ASGI middleware that passes on valid requests and refuses others.

    Args:
        app: application.
        limits: limits on bodies and requests.
        key: API key that clients send as ``Authorization: Bearer KEY``; None accepts requests without a key.
        host: address the server listens at.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, key: str | None, host: str) -> None:
        self._app, self._limits, self._host = app, limits, host
        self._key = None if key is None else _digest(key.encode())
        self._working = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        def begin() -> None:
            nonlocal begun
            begun = True

        sending = _call_before("http.response.start", begin, _with_timeout(send, self._limits.send_s))
        with suppress(_Stalled):  # the server closes the connection of an incomplete answer
            try:
                await self._answer_or_refuse(scope, receive, sending)
            except asyncio.CancelledError:  # at shutdown; otherwise uvicorn logs a traceback and answers in plain text
                if not begun:
                    await error_response(ENDED, scope["path"])(scope, receive, sending)

    async def _answer_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_asker(scope)
            if scope["method"] == "POST":
                await self._answer(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except ResponseError as error:
            await error_response(error, scope["path"])(scope, receive, send)

    def _check_asker(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._key is None:
            check_origin(headers, host=self._host)
        elif scope["path"] not in OPEN_PATHS:
            self._check_key(self._key, headers.get("authorization", ""))

    def _check_key(self, key: bytes, authorization: str) -> None:
        bearer = authorization[len(BEARER) :] if authorization.lower().startswith(BEARER) else ""
        if not hmac.compare_digest(key, _digest(bearer.encode("latin-1"))):
            message = "this server needs its API key; send it as 'Authorization: Bearer KEY'"
            headers = {"WWW-Authenticate": "Bearer", **CLOSE}
            raise ResponseError(401, message, code="invalid_api_key", headers=headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._working >= self._limits.requests:
            message = f"the server is processing its maximum of {self._working} requests; try again"
            headers = {"Retry-After": "1", **CLOSE}
            raise ResponseError(429, message, code="rate_limit_exceeded", headers=headers)
        with ExitStack() as slot:
            self._working += 1
            slot.callback(self._end_request)
            body = await self._body(scope, receive)
            if body is not None:
                async with AsyncExitStack() as exits:
                    # before the last part, so that a client that has all of an answer can send its next request
                    sending = _call_before("http.response.body", slot.close, send)
                    await _run_until(_disconnected(receive), self._app({**scope, EXITS: exits}, _replay(body), sending))

    def _end_request(self) -> None:
        self._working -= 1

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Complete body; None if the client disconnected."""
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and len(declared) < 20:
            self._check_size(int(declared))
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    self._check_size(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            sentence = f"the body did not arrive within {self._limits.body_s:g} s; send it faster"
            raise ResponseError(408, sentence, headers=CLOSE) from None
        return None

    def _check_size(self, size: int) -> None:
        if size > (most := self._limits.body_bytes):
            raise ResponseError(413, f"a body may have at most {most} bytes; shorten it", headers=CLOSE)


def _digest(key: bytes) -> bytes:
    """Digest of fixed length, for comparison in constant time."""
    return sha256(key).digest()


def _replay(body: bytes) -> Receive:
    """ASGI receive function that returns a body already read, then waits forever."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive


class _Stalled(Exception):  # noqa: N818 -- internal, never reported
    """Client that did not read a part of an answer in time."""


def _with_timeout(send: Send, seconds: float) -> Send:
    """ASGI send function with a time limit; without one it waits for the client to read.

    Raises:
        _Stalled: it took longer than ``seconds``. Not ``TimeoutError``: that is an ``OSError``, which starlette treats
            as a disconnected client.
    """

    async def sending(message: Message) -> None:
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            raise _Stalled from None

    return sending


def _call_before(kind: str, do: Callable[[], None], send: Send) -> Send:
    """ASGI send function that calls ``do`` before the last message of a type."""

    async def sending(message: Message) -> None:
        if message["type"] == kind and not message.get("more_body", False):
            do()
        await send(message)

    return sending


async def _disconnected(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _run_until(stop: Awaitable[None], work: Awaitable[None]) -> None:
    """Run ``work``; cancel it when ``stop`` completes first. If cancelled, do not wait for threads of ``work``."""
    tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(one) for one in (work, stop)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    except asyncio.CancelledError:
        while left := [task for task in tasks if task.cancel()]:  # the first cancel() does not end a wait for a thread
            await asyncio.wait(left, timeout=0.01)
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
