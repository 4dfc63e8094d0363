"""``Server``: an application on a port, which ends its answers before it ends.

A first SIGTERM or Ctrl-C closes the engine: ``/health`` says "draining", new requests get 503, and answers that were
begun go on, for as long as ``Limits.drain_s``. Then the port closes. A second signal ends at once.

Who reads nothing for ``Limits.send_s`` loses the connection. The guard gives the answer up, but uvicorn closes politely
and keeps what was written before until it is read; on Linux the system itself ends such a connection
(``TCP_USER_TIMEOUT``, tcp(7)).
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
from octavo.server.connections import QUEUE, room_for, tell_rarely, uvicorn_config
from octavo.server.origins import is_loopback
from octavo.server.service import Service

__all__ = ["Address", "Server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens.

    Attributes:
        host: a name or an IP address.
        port: 0 takes any that is free.

    Example:
        >>> Address(host="127.0.0.1").is_loopback, Address(host="0.0.0.0").is_loopback
        (True, False)
    """

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def is_loopback(self) -> bool:
        """Whether this machine alone can reach it; of a name other than "localhost" nobody knows."""
        return is_loopback(self.host)

    def check_secure(self, *, key: str | None, insecure: bool) -> None:
        """Refuse to be asked by other machines without a key, unless that is wanted.

        Raises:
            ConfigError: it would be.
        """
        if not (self.is_loopback or key is not None or insecure):
            raise ConfigError(
                f"at {self.host} other machines can ask this server; give --api-key-file, or --insecure to let "
                "everybody, or listen at 127.0.0.1"
            )

    def bind(self) -> socket.socket:
        """Take the port and listen, since until one listens another process can bind the same port.

        Raises:
            ConfigError: there is no such address, or somebody has it.
        """
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with ExitStack() as unless_bound:
                made = unless_bound.enter_context(socket.socket(family, kind, protocol))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.bind(place)
                made.listen(QUEUE)
                unless_bound.pop_all()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"cannot listen at {self.host} port {self.port}: {reason}; choose another") from error
        return made


def _ignore() -> None:
    """Nobody asked to be told."""


class Server(uvicorn.Server):
    """Serves until it is told to end: ``Server(service).run(sockets=[address.bind()])``.

    Args:
        service: what it serves.
        key: as :func:`octavo.server.create_app` takes it.
        host: of the address it listens at.
        on_ready: is called once it listens.
    """

    def __init__(
        self,
        service: Service,
        *,
        key: str | None = None,
        host: str = "127.0.0.1",
        on_ready: Callable[[], None] = _ignore,
    ) -> None:
        self._service, self._on_ready = service, on_ready
        self._drain_until: float | None = None
        room = room_for(service.limits)
        app = create_app(service, key=key, host=host, requests=room.requests)
        super().__init__(uvicorn_config(app, limits=service.limits, room=room))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        if sys.platform == "linux":  # elsewhere what the guard gave up is held until its client goes
            most_ms = min(math.ceil(1000 * self._service.limits.send_s), 2**31 - 1)
            for listening in sockets or ():
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)  # of all it accepts
        tell_rarely(asyncio.get_running_loop())
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)  # asyncio set its own, the number that it accepts in one go
        self._on_ready()

    def drain(self) -> None:
        """Take no more requests, and end when those taken are answered."""
        self._service.thread.engine.close()
        self._drain_until = time.monotonic() + self._service.limits.drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; end at the second."""
        if self._drain_until is None:
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._drain_until is not None:
            engine = self._service.thread.engine
            load, late = engine.load, time.monotonic() >= self._drain_until
            if late:
                engine.cancel_all()
            is_working = load.running or load.waiting or self._service.lanes.are_busy
            self.should_exit = self.should_exit or late or not is_working
        return await super().on_tick(counter)
