"""Connections: how many there may be, and how long each may take to ask.

- A request's head has to arrive within ``Limits.head_s``, counted from the first moment in which the connection had
  nothing to be answered; a body that a request of another method than POST brings, too. (guard.py times POST's.)
- Where one more comes than there may be, the connection that has been waiting longest without a request is closed for
  it, so that idle clients cannot shut others out. Where all are being answered, the new one gets 503.
- There are no more than the descriptors that the process may open (RLIMIT_NOFILE, raised as far as needed and allowed),
  and fewer requests than connections, so that ``/health`` answers in a flood.

asyncio accepts as many connections in one go as its backlog names, and only then makes protocols of them: up to
``IN_FLIGHT`` such lots are open before the first is counted. So lots are small, and the system's own queue is not.
"""

import asyncio
import http
import json
import logging
import os
import resource
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.errors import ConfigError
from octavo.server.limits import Limits
from octavo.server.refusals import Refusal, refusal_body

__all__ = ["QUEUE", "BoundedProtocol", "Room", "room_for", "tell_rarely", "uvicorn_config"]

RESERVED = 8  # connections beyond requests
SPARE = 16  # descriptors for files and what else a process opens
IN_FLIGHT, LOT = 4, 64
QUEUE = 1024  # connections that the system keeps until they are accepted
CLOSING_S = 2  # that what is answered has to leave through the socket
ACCEPT = "socket.accept() out of system resource"  # asyncio's words
TELL_S = 60.0


@dataclass(frozen=True, slots=True)
class Room:
    """What a process has descriptors for.

    Attributes:
        connections: at once.
        requests: worked on at once.
        lot: connections accepted in one go.
    """

    connections: int
    requests: int
    lot: int


def uvicorn_config(app: ASGIApp, *, limits: Limits, room: Room) -> uvicorn.Config:
    """How uvicorn serves an application here: octavo's answers are all that it says, and its log is for mistakes."""
    protocol = partial(BoundedProtocol, most=room.connections, head_s=limits.head_s)
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="error",  # a client's mistake is told to the client
        access_log=False,
        server_header=False,
        backlog=room.lot,
        timeout_graceful_shutdown=CLOSING_S,
    )


def room_for(limits: Limits) -> Room:
    """As many connections and requests as the limits say, or as there are descriptors for.

    Raises:
        ConfigError: the process may open too few files to serve at all.
    """
    connections, requests = limits.connections, limits.requests
    used = len(os.listdir("/dev/fd"))  # noqa: PTH208 -- names, not paths
    lot = min(LOT, max(1, connections // 16))
    allowed = _raise_limit(used + SPARE + IN_FLIGHT * lot + connections)
    lot = min(lot, max(1, (allowed - used - SPARE) // 16))
    possible = min(connections, allowed - used - SPARE - IN_FLIGHT * lot)
    if possible < min(connections, RESERVED + 1):
        raise ConfigError(
            f"this process may open {allowed} files, of which {used} are open, too few to serve; allow more (ulimit -n)"
        )
    return Room(possible, max(1, min(requests, possible - RESERVED)), lot)


def _raise_limit(wanted: int) -> int:
    """How many descriptors may be open, after asking for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a bound on the number of connections, and a time for what comes before an answer.

    Args:
        most: connections at once.
        head_s: seconds for a request's head.
    """

    def __init__(self, *, most: int, head_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._most, self._head_s = most, head_s
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since = self.loop.time()

    @property
    def _is_answered(self) -> bool:
        """Whether a request has come that is not answered yet."""
        return bool(self.cycle) and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and wait for its first head."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._make_room()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take a part of a head or of a body."""
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, unless an answer has begun that this would stand in."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(Refusal(400, "this is no HTTP/1.1 request; check its first line, its headers and its body"))
        self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for another head."""
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        self._stop_timer()

    def _watch(self) -> None:
        if self._is_answered or self.transport.is_closing():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._head_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(Refusal(408, f"the request's head did not arrive within {self._head_s:g} s; send it faster"))
        self.transport.close()

    def _make_room(self) -> None:
        others = [own for own in self.connections if isinstance(own, BoundedProtocol) and own is not self]
        waiting = [own for own in others if not own._is_answered]  # noqa: SLF001 -- of the same class
        if not waiting:
            sentence = f"{self._most} connections are being answered, which is as many as may; try again"
            self._refuse(Refusal(503, sentence, headers={"Retry-After": "1"}))
            self.transport.close()
            return
        longest = min(waiting, key=lambda own: own._waiting_since)  # noqa: SLF001 -- of the same class
        self.connections.discard(longest)  # now, not when its socket is closed: another may come before
        longest.transport.abort()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer where no request is, so that no application can."""
        body = json.dumps(refusal_body(refusal, "/")).encode()
        headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = [f"{name}: {value}" for name, value in (headers | refusal.headers).items()]
        status = f"HTTP/1.1 {refusal.status} {http.HTTPStatus(refusal.status).phrase}"
        self.transport.write("\r\n".join([status, *lines, "", ""]).encode() + body)


class _Teller:
    """Logs that no connection can be accepted, once in ``TELL_S``; asyncio would tell it for each try."""

    def __init__(self) -> None:
        self._told = -TELL_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != ACCEPT:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._told >= TELL_S:
            self._told = time.monotonic()
            logging.getLogger("uvicorn.error").error("no connection can be accepted: %s", context["exception"])


def tell_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """Keep a loop that runs out of descriptors, and clients that leave in mid-answer, from flooding the log."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # its warnings are of writes to clients that left
    loop.set_exception_handler(_Teller())
