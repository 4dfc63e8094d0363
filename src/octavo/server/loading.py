"""Answers of a server while its model is loading.

A server binds its port before loading, so that a port in use is an error at once. Clients can connect from then on, and
an orchestrator must see a process that is alive and not ready.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from octavo.server.connections import capacity_for, uvicorn_config
from octavo.server.error_responses import CLOSE, ResponseError, error_response
from octavo.server.limits import Limits

__all__ = ["answer_not_ready"]


@contextmanager
def answer_not_ready(listening: socket, *, limits: Limits) -> Iterator[None]:
    """Answer at a socket until the block ends; later connections wait for the next server at the socket.

    ``/v2/health/live`` returns 200, all other paths 503.
    """
    server = uvicorn.Server(uvicorn_config(_not_ready, limits=limits, capacity=capacity_for(limits)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening.dup()]}, name="octavo-not-ready")
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _not_ready(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    if path == "/v2/health/live":
        response = Response(headers=CLOSE)
    elif path == "/health":
        response = JSONResponse({"status": "loading"}, 503, CLOSE)
    else:
        headers = {"Retry-After": "1", **CLOSE}
        response = error_response(
            ResponseError(503, "the model is still being loaded; try again", headers=headers), path
        )
    await response(scope, receive, send)
