"""``create_app``: a service as an ASGI application, for uvicorn or any other server of them."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from octavo.errors import OctavoError
from octavo.server.chats import Chats
from octavo.server.completions import Completions
from octavo.server.guard import Guard
from octavo.server.kserve import KServe
from octavo.server.metrics import Metrics
from octavo.server.models import Models
from octavo.server.openapi import openapi
from octavo.server.operations import Operation, routes
from octavo.server.refusals import Refusal, answer_refusal
from octavo.server.service import Service

__all__ = ["create_app"]

HTML = "text/html"


def _always(response: Response) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose answer never changes."""

    async def answer(_: Request) -> Response:
        return response

    return answer


def create_app(
    service: Service, *, key: str | None = None, host: str = "127.0.0.1", requests: int | None = None
) -> Starlette:
    """The application.

    Args:
        service: what it serves.
        key: what has to be sent as ``Authorization: Bearer KEY``; None asks for none, and refuses web pages of
            others.
        requests: that are worked on at once, where that has to be fewer than the service's limit.
        host: where the server listens; at a loopback address without a key it is asked by a loopback name alone.
    """
    limits = service.limits if requests is None else replace(service.limits, requests=requests)
    surfaces = (Models(service), Completions(service), Chats(service), KServe(service), Metrics(service.thread.engine))
    operations = [operation for surface in surfaces for operation in surface.operations()]
    described = JSONResponse(openapi(operations))
    page = HTMLResponse(resources.files("octavo.server").joinpath("chat.html").read_text(encoding="utf-8"))
    own = (
        Operation(method="GET", path="/openapi.json", run=_always(described), about="This file"),
        Operation(method="GET", path="/", run=_always(page), about="A page to chat with the model", answers=(HTML,)),
    )
    refused = (HTTPException, Refusal, OctavoError, Exception)
    return Starlette(
        routes=routes([*operations, *own]),
        middleware=[Middleware(Guard, limits=limits, key=key, host=host)],
        exception_handlers=dict.fromkeys(refused, answer_refusal),
    )
