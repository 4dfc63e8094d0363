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

from octavo.server.error_responses import CLOSE, Refusal, refusal_response
from octavo.server.limits import Limits
from octavo.server.origins import check_origin

__all__ = ["EXITS", "OPEN_PATHS", "Guard"]

EXITS = "octavo.exits"  # key in a request's scope of the exit stack that is closed after the request
OPEN_PATHS = ("/", "/health", "/v2/health/live", "/v2/health/ready")
BEARER = "bearer "
ENDED = Refusal(503, "the server ended before it answered; use another server", code="draining", headers=CLOSE)


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

        sending = _call_before_start(_with_timeout(send, self._limits.send_s), begin)
        with suppress(_Stalled):  # the server closes the connection of an incomplete answer
            try:
                await self._answer_or_refuse(scope, receive, sending)
            except asyncio.CancelledError:  # at shutdown; otherwise uvicorn logs a traceback and answers in plain text
                if not begun:
                    await refusal_response(ENDED, scope["path"])(scope, receive, sending)

    async def _answer_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_asker(scope)
            if scope["method"] == "POST":
                await self._answer(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refusal as refusal:
            await refusal_response(refusal, scope["path"])(scope, receive, send)

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
            raise Refusal(401, message, code="invalid_api_key", headers=headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._working >= self._limits.requests:
            message = f"the server is processing its maximum of {self._working} requests; try again"
            headers = {"Retry-After": "1", **CLOSE}
            raise Refusal(429, message, code="rate_limit_exceeded", headers=headers)
        with ExitStack() as slot:
            self._working += 1
            slot.callback(self._leave)
            body = await self._body(scope, receive)
            if body is not None:
                async with AsyncExitStack() as exits:
                    answered = self._app({**scope, EXITS: exits}, _replay(body), _call_before_end(send, slot.close))
                    await _run_until(_disconnected(receive), answered)

    def _leave(self) -> None:
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
            raise Refusal(408, sentence, headers=CLOSE) from None
        return None

    def _check_size(self, size: int) -> None:
        if size > (most := self._limits.body_bytes):
            raise Refusal(413, f"a body may have at most {most} bytes; shorten it", headers=CLOSE)


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


def _call_before_end(send: Send, do: Callable[[], None]) -> Send:
    """ASGI send function that calls ``do`` before the last part, so a client with all of an answer can send again."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            do()
        await send(message)

    return sending


def _call_before_start(send: Send, do: Callable[[], None]) -> Send:
    """ASGI send function that calls ``do`` before the first part."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
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
        while left := [task for task in tasks if task.cancel()]:  # at the first a lane stays for its thread
            await asyncio.wait(left, timeout=0.01)
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
