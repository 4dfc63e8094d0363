"""Limits on connections: their number, and the time each may take to send a request.

- The head of a request must arrive within ``Limits.head_s`` after the connection became idle; so must the body of a
  request with a method other than POST (guard.py limits the time of POST bodies).
- A connection beyond the limit replaces the one that has been idle longest, so that idle clients cannot block others.
  If all connections are being answered, the new one gets 503.
- The limit is at most the number of file descriptors that the process may open (RLIMIT_NOFILE, raised as needed and
  allowed). Fewer requests than connections are processed at once, so ``/health`` answers under load.

asyncio accepts up to its backlog of connections in one batch before it creates their protocols: up to ``IN_FLIGHT``
batches are open before the first is counted. So the batches are small, while the system's own queue is large.
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
from octavo.server.error_responses import ResponseError, error_body
from octavo.server.limits import Limits

__all__ = ["QUEUE", "BoundedProtocol", "Capacity", "capacity_for", "limit_log", "uvicorn_config"]

RESERVED = 8  # connections beyond requests
SPARE = 16  # descriptors for files and other uses
IN_FLIGHT, BATCH = 4, 64
QUEUE = 1024  # connections that the system queues until they are accepted
CLOSING_S = 2  # seconds for sending the last responses at shutdown
ACCEPT = "socket.accept() out of system resource"  # asyncio's message
LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Number of connections and requests that the process has file descriptors for.

    Attributes:
        connections: open at once.
        requests: processed at once.
        batch: connections accepted in one batch.
    """

    connections: int
    requests: int
    batch: int


def uvicorn_config(app: ASGIApp, *, limits: Limits, capacity: Capacity) -> uvicorn.Config:
    """Configuration of uvicorn: octavo's protocol and limits, no access log, errors logged only."""
    protocol = partial(BoundedProtocol, most=capacity.connections, head_s=limits.head_s)
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="error",  # a client's error is reported to the client
        access_log=False,
        server_header=False,
        backlog=capacity.batch,
        timeout_graceful_shutdown=CLOSING_S,
    )


def capacity_for(limits: Limits) -> Capacity:
    """Connections and requests within both the limits and the available file descriptors.

    Raises:
        ConfigError: the process may open too few files to serve.
    """
    connections, requests = limits.connections, limits.requests
    used = len(os.listdir("/dev/fd"))  # noqa: PTH208 -- names, not paths
    batch = min(BATCH, max(1, connections // 16))
    allowed = _raise_limit(used + SPARE + IN_FLIGHT * batch + connections)
    batch = min(batch, max(1, (allowed - used - SPARE) // 16))
    possible = min(connections, allowed - used - SPARE - IN_FLIGHT * batch)
    if possible < min(connections, RESERVED + 1):
        raise ConfigError(
            f"this process may open {allowed} files and {used} are open, too few to serve; raise ulimit -n"
        )
    return Capacity(possible, max(1, min(requests, possible - RESERVED)), batch)


def _raise_limit(needed: int) -> int:
    """Raise the soft limit of open files towards ``needed``; return the limit now in effect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return needed if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a limit on connections and on the time until a request arrives.

    Args:
        most: connections at once.
        head_s: seconds for a request's head.
        options: arguments of uvicorn's protocol.
    """

    def __init__(self, *, most: int, head_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._most, self._head_s = most, head_s
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since = self.loop.time()

    @property
    def _is_answered(self) -> bool:
        """True while a request is being answered."""
        return bool(self.cycle) and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Enforce the limit of connections and start the timer for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._make_room()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Pass on data, and start or stop the timer."""
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, unless an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(
                ResponseError(400, "this is no HTTP/1.1 request; check its first line, its headers and its body")
            )
        self.transport.close()

    def on_response_complete(self) -> None:
        """Start waiting for another request."""
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
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
            self._send_error(
                ResponseError(408, f"the request's head did not arrive within {self._head_s:g} s; send it faster")
            )
        self.transport.close()

    def _make_room(self) -> None:
        others = [each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self]
        idle = [each for each in others if not each._is_answered]  # noqa: SLF001 -- of the same class
        if not idle:
            sentence = f"the server is answering its maximum of {self._most} connections; try again"
            self._send_error(ResponseError(503, sentence, headers={"Retry-After": "1"}))
            self.transport.close()
            return
        longest = min(idle, key=lambda each: each._waiting_since)  # noqa: SLF001 -- of the same class
        self.connections.discard(longest)  # at once: another connection may come before its socket is closed
        longest.transport.abort()

    def _send_error(self, error: ResponseError) -> None:
        """Write an error response to the transport; without a request no application can answer."""
        body = json.dumps(error_body(error, "/")).encode()
        headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = [f"{name}: {value}" for name, value in (headers | error.headers).items()]
        status = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"
        self.transport.write("\r\n".join([status, *lines, "", ""]).encode() + body)


class _AcceptErrorLogger:
    """Exception handler that logs failures to accept connections once in ``LOG_INTERVAL_S``; asyncio logs every try."""

    def __init__(self) -> None:
        self._logged_at = -LOG_INTERVAL_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != ACCEPT:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            logging.getLogger("uvicorn.error").error("no connection can be accepted: %s", context["exception"])


def limit_log(loop: asyncio.AbstractEventLoop) -> None:
    """Limit the log entries about failed accepts and about clients that disconnect during an answer."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # its warnings concern writes to disconnected clients
    loop.set_exception_handler(_AcceptErrorLogger())
