"""HTTP server with graceful shutdown.

The first SIGTERM or Ctrl-C closes the engine: ``/health`` reports "draining", new requests get 503, and running answers
continue for up to ``Limits.drain_s``. Then the port closes. A second signal ends the server at once.

A client that reads nothing for ``Limits.send_s`` is disconnected. The guard cancels the answer, but uvicorn keeps the
connection open until the data already written is read; on Linux ``TCP_USER_TIMEOUT`` (tcp(7)) ends it.
"""

import asyncio
import math
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

import uvicorn

from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.connections import QUEUE, capacity_for, limit_log, uvicorn_config
from octavo.server.origins import is_loopback
from octavo.server.service import Service

__all__ = ["Address", "Server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address that a server listens at.

    Attributes:
        host: name or IP address.
        port: TCP port; 0 selects a free one.

    Example:
        >>> Address(host="127.0.0.1").is_loopback, Address(host="0.0.0.0").is_loopback
        (True, False)
    """

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address; names other than "localhost" are not resolved."""
        return is_loopback(self.host)

    def check_secure(self, *, key: str | None, insecure: bool) -> None:
        """Check that other machines cannot send requests without a key.

        Raises:
            ConfigError: they could, and ``insecure`` is False.
        """
        if not (self.is_loopback or key is not None or insecure):
            raise ConfigError(
                f"at {self.host} other machines can send requests to this server; give --api-key-file, or --insecure "
                "to allow anyone, or listen at 127.0.0.1"
            )

    def bind(self) -> socket.socket:
        """Bind the port and listen; without listening another process could bind it too.

        Raises:
            ConfigError: there is no such address, or it is in use.
        """
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with ExitStack() as unless_bound:
                listening = unless_bound.enter_context(socket.socket(family, kind, protocol))
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(place)
                listening.listen(QUEUE)
                unless_bound.pop_all()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"cannot listen at {self.host} port {self.port}: {reason}; choose another") from error
        return listening


class Server(uvicorn.Server):
    """HTTP server that runs until a signal: ``Server(service).run(sockets=[address.bind()])``.

    Args:
        service: model, engine and limits.
        key: see :func:`octavo.server.create_app`.
        host: host of the address it listens at.
        on_ready: called once when the server listens.
    """

    def __init__(
        self,
        service: Service,
        *,
        key: str | None = None,
        host: str = "127.0.0.1",
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._service, self._on_ready = service, on_ready
        self._drain_until: float | None = None
        capacity = capacity_for(service.limits)
        app = create_app(service, key=key, host=host, requests=capacity.requests)
        super().__init__(uvicorn_config(app, limits=service.limits, capacity=capacity))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and call ``on_ready``."""
        if sys.platform == "linux":  # elsewhere a cancelled answer's connection stays until its client disconnects
            most_ms = min(math.ceil(1000 * self._service.limits.send_s), 2**31 - 1)
            for listening in sockets or ():
                listening.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms
                )  # inherited by accepted sockets
        limit_log(asyncio.get_running_loop())
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)  # asyncio set its batch size as the backlog
        self._on_ready()

    def drain(self) -> None:
        """Refuse new requests, and end when all accepted ones are answered."""
        self._service.thread.engine.close()
        self._drain_until = time.monotonic() + self._service.limits.drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; end at the second."""
        if self._drain_until is None:
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return True to end the server; called ten times a second."""
        if self._drain_until is not None:
            engine = self._service.thread.engine
            load, late = engine.load, time.monotonic() >= self._drain_until
            if late:
                engine.cancel_all()
            is_working = load.running or load.waiting or self._service.thread_pools.are_busy
            self.should_exit = self.should_exit or late or not is_working
        return await super().on_tick(counter)
