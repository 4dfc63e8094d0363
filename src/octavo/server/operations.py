"""Operations of the server, from which its routes and ``/openapi.json`` are generated."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import parsing
from octavo.errors import DataError
from octavo.server.error_responses import ResponseError
from octavo.server.fields import JsonObject

__all__ = ["JSON", "Operation", "body_of", "bytes_of", "parse_json", "routes"]

JSON, EVENTS = "application/json", "text/event-stream"
PLAIN = "identity"  # content coding of an uncompressed body


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        method: GET or POST.
        path: path with parameters in braces.
        run: handler that returns the response.
        about: one-line description.
        body: fields of the request's body; None for no body.
        answers: media types of the response.
    """

    method: str
    path: str
    run: Callable[[Request], Awaitable[Response]]
    about: str
    body: JsonObject | None = None
    answers: tuple[str, ...] = (JSON,)


def routes(operations: Iterable[Operation]) -> list[Route]:
    """Starlette's routes of the operations."""
    return [Route(each.path, each.run, methods=[each.method]) for each in operations]


async def body_of(request: Request, record: JsonObject) -> dict[str, Any]:
    """Read the fields of a request's body.

    Raises:
        ResponseError: the body is compressed or not JSON.
        FieldError: a field is missing, unknown or invalid.
    """
    return record.read(parse_json(await bytes_of(request)))


async def bytes_of(request: Request) -> bytes:
    """Read a request's body.

    Raises:
        ResponseError: the body is compressed, which is not supported, since a small body may become a large one.
    """
    coding = request.headers.get("content-encoding", PLAIN)
    if coding.lower() != PLAIN:
        raise ResponseError(
            415, f"the content coding {ascii(coding)[:80]} is not supported; send the body uncompressed"
        )
    return await request.body()


def parse_json(body: bytes) -> Any:
    """Parse a body as JSON.

    Raises:
        ResponseError: the body is not JSON in UTF-8.
    """
    try:
        return parsing.parse_json(body.decode())
    except UnicodeDecodeError as error:
        raise ResponseError(400, f"the body is not UTF-8 at byte {error.start}; send JSON in UTF-8") from None
    except DataError as error:
        raise ResponseError(400, f"the body is not JSON: {error}") from None
