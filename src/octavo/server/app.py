"""ASGI application of a service, for uvicorn or another ASGI server."""

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
from octavo.server.error_responses import ResponseError, handle_error
from octavo.server.guard import Guard
from octavo.server.kserve import KServe
from octavo.server.metrics import Metrics
from octavo.server.models import Models
from octavo.server.openapi import openapi
from octavo.server.operations import Operation, routes
from octavo.server.service import Service

__all__ = ["create_app"]

HTML = "text/html"


def _always(response: Response) -> Callable[[Request], Awaitable[Response]]:
    """Endpoint that always returns the same response."""

    async def endpoint(_: Request) -> Response:
        return response

    return endpoint


def create_app(
    service: Service, *, key: str | None = None, host: str = "127.0.0.1", requests: int | None = None
) -> Starlette:
    """Create the ASGI application of a service.

    Args:
        service: model, engine and limits.
        key: API key that clients send as ``Authorization: Bearer KEY``; None accepts requests without a key, except
            from other sites' web pages.
        requests: concurrent requests; None is the service's limit.
        host: address the server listens at; a loopback address without a key accepts only loopback names as ``Host``.
    """
    limits = service.limits if requests is None else replace(service.limits, requests=requests)
    surfaces = (Models(service), Completions(service), Chats(service), KServe(service), Metrics(service.thread.engine))
    operations = [operation for surface in surfaces for operation in surface.operations()]
    described = JSONResponse(openapi(operations))
    page = HTMLResponse(resources.files("octavo.server").joinpath("chat.html").read_text(encoding="utf-8"))
    static = (
        Operation(method="GET", path="/openapi.json", run=_always(described), about="This file"),
        Operation(method="GET", path="/", run=_always(page), about="A page to chat with the model", answers=(HTML,)),
    )
    handled = (HTTPException, ResponseError, OctavoError, Exception)
    return Starlette(
        routes=routes([*operations, *static]),
        middleware=[Middleware(Guard, limits=limits, key=key, host=host)],
        exception_handlers=dict.fromkeys(handled, handle_error),
    )
