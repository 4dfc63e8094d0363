"""``Operation``: one path of the server, from which its route and its part of ``/openapi.json`` are made."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import parsing
from octavo.errors import DataError
from octavo.server.fields import Record
from octavo.server.refusals import Refusal

__all__ = ["JSON", "Operation", "body_of", "bytes_of", "parse_json", "routes"]

JSON, EVENTS = "application/json", "text/event-stream"
PLAIN = "identity"  # HTTP's word for a body that is not compressed


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What can be asked for.

    Attributes:
        method: GET or POST.
        path: with places in braces.
        run: makes the response.
        about: one line.
        body: what has to be sent; None for nothing.
        answers: media types of the response.
    """

    method: str
    path: str
    run: Callable[[Request], Awaitable[Response]]
    about: str
    body: Record | None = None
    answers: tuple[str, ...] = (JSON,)


def routes(operations: Iterable[Operation]) -> list[Route]:
    """For starlette."""
    return [Route(each.path, each.run, methods=[each.method]) for each in operations]


async def body_of(request: Request, record: Record) -> dict[str, Any]:
    """The fields of a request's body.

    Raises:
        Refusal: it is compressed, or no JSON.
        FieldError: it holds something else.
    """
    return record.read(parse_json(await bytes_of(request)))


async def bytes_of(request: Request) -> bytes:
    """A request's body.

    Raises:
        Refusal: it is compressed. A small body could become a large one, so the server decompresses none.
    """
    coding = request.headers.get("content-encoding", PLAIN)
    if coding.lower() != PLAIN:
        raise Refusal(415, f"a body in the coding {ascii(coding)[:80]} is not read here; send it as it is")
    return await request.body()


def parse_json(body: bytes) -> Any:
    """The value in a body.

    Raises:
        Refusal: it is no JSON in UTF-8.
    """
    try:
        return parsing.parse_json(body.decode())
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 at byte {error.start}; send JSON in UTF-8") from None
    except DataError as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
