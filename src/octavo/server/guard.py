"""``Guard``: what every request passes before anything looks at it, and who watches it afterwards.

1. The key, compared in constant time. Health and the chat page need none. Where there is no key at all, whether it is
   a web page of somebody else that asks (origins.py).
2. How many requests are being worked on. One is until the last part of its answer is there to be sent.
3. The body: how large it is, and how long it takes to come. Only a whole body goes on.
4. While it is answered, whether whoever asked is still there. When they go, the work on it is cancelled, and leaving
   its exit stack ends what the engine still does for it. Who stays and reads nothing is given up, too: each part of
   an answer has to be taken within a time.
5. Whether the server ends before there is an answer: it is refused then, as everything else is.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.limits import Limits
from octavo.server.origins import check_origin
from octavo.server.refusals import CLOSE, Refusal, refusal_response

__all__ = ["EXITS", "OPEN_PATHS", "Guard"]

EXITS = "octavo.exits"  # in a request's scope: what is left when the request is over
OPEN_PATHS = ("/", "/health", "/v2/health/live", "/v2/health/ready")
BEARER = "bearer "
ENDED = Refusal(503, "the server ended before it answered; ask another", code="draining", headers=CLOSE)


class Guard:
    """Passes on the requests that may be answered.

    Args:
        app: what answers them.
        limits: of bodies and requests.
        key: what has to be sent as ``Authorization: Bearer KEY``; None asks for none.
        host: where the server listens.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, key: str | None, host: str) -> None:
        self._app, self._limits, self._host = app, limits, host
        self._key = None if key is None else _digest(key.encode())
        self._working = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        def begin() -> None:
            nonlocal begun
            begun = True

        sending = _before_start(_in_time(send, self._limits.send_s), begin)
        with suppress(_Stalled):  # an answer that is left without an end makes whoever called this close the connection
            try:
                await self._answer_or_refuse(scope, receive, sending)
            except asyncio.CancelledError:  # the server ends: it would say so with a traceback and in plain text
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

    def _check_key(self, key: bytes, given: str) -> None:
        bearer = given[len(BEARER) :] if given.lower().startswith(BEARER) else ""
        if not hmac.compare_digest(key, _digest(bearer.encode("latin-1"))):
            message = "this server wants its API key, sent as 'Authorization: Bearer KEY'"
            headers = {"WWW-Authenticate": "Bearer", **CLOSE}
            raise Refusal(401, message, code="invalid_api_key", headers=headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._working >= self._limits.requests:
            message = f"{self._working} requests are being worked on, which is as many as may; try again"
            headers = {"Retry-After": "1", **CLOSE}
            raise Refusal(429, message, code="rate_limit_exceeded", headers=headers)
        with ExitStack() as slot:
            self._working += 1
            slot.callback(self._leave)
            body = await self._body(scope, receive)
            if body is not None:
                async with AsyncExitStack() as exits:
                    answered = self._app({**scope, EXITS: exits}, _replay(body), _before_end(send, slot.close))
                    await _unless(_gone(receive), answered)

    def _leave(self) -> None:
        self._working -= 1

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None where whoever sent it went away."""
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
            raise Refusal(413, f"a body may have {most} bytes; shorten it", headers=CLOSE)


def _digest(key: bytes) -> bytes:
    """Of one length, whatever was sent."""
    return sha256(key).digest()


def _replay(body: bytes) -> Receive:
    """What an application receives of a request that was read before: the body, and then nothing more."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive


class _Stalled(Exception):  # noqa: N818 -- nothing that octavo says of itself
    """A part of an answer was not taken in time."""


def _in_time(send: Send, seconds: float) -> Send:
    """Sends; a server waits in it for whoever reads, and they need not.

    Raises:
        _Stalled: it took longer than ``seconds``. A ``TimeoutError`` is an ``OSError``, which starlette takes for a
            client that left.
    """

    async def sending(message: Message) -> None:
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            raise _Stalled from None

    return sending


def _before_end(send: Send, do: Callable[[], None]) -> Send:
    """Sends, and does something before the last part: whoever has all of an answer may ask again at once."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            do()
        await send(message)

    return sending


def _before_start(send: Send, do: Callable[[], None]) -> Send:
    """Sends, and does something before the first part."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            do()
        await send(message)

    return sending


async def _gone(receive: Receive) -> None:
    """Return when whoever asked goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(over: Awaitable[None], work: Awaitable[None]) -> None:
    """Do the work, and leave it when it is over; where the server ends, without waiting for threads that work on it."""
    tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(one) for one in (work, over)]
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
