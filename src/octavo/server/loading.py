"""``answer_not_ready``: a server's answers while its model is still being loaded.

Who takes a port early keeps another server from it, and finds out at once that it is taken. From then on clients can
connect, so they are answered: an orchestrator has to see a process that lives and is not ready.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from octavo.server.connections import room_for, uvicorn_config
from octavo.server.limits import Limits
from octavo.server.refusals import CLOSE, Refusal, refusal_response

__all__ = ["answer_not_ready"]


@contextmanager
def answer_not_ready(listening: socket, *, limits: Limits) -> Iterator[None]:
    """Answer at a socket until the block ends; what connects afterwards waits for the next server there.

    ``/v2/health/live`` is 200; all else is 503.
    """
    server = uvicorn.Server(uvicorn_config(_not_ready, limits=limits, room=room_for(limits)))
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
        response = refusal_response(Refusal(503, "the model is still being loaded; try again", headers=headers), path)
    await response(scope, receive, send)
