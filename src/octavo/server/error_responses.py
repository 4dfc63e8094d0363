"""Error responses: status, message and the format of each protocol.

| protocol            | body of an error                                                             |
|---------------------|------------------------------------------------------------------------------|
| KServe, ``/v2/...`` | ``{"error": message}``; its clients accept nothing else                      |
| all others          | ``{"error": {"message": …, "type": …, "param": …, "code": …}}``, as OpenAI's |

Clients never get a traceback: an unexpected error is "server_error" to them, and is written to the server's log.
"""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from octavo.errors import ClosedError, OctavoError, QueueFullError
from octavo.inference import Event, FinishReason
from octavo.server.fields import FieldError

__all__ = [
    "CONTEXT",
    "ResponseError",
    "check_event",
    "error_body",
    "error_response",
    "handle_error",
    "to_response_error",
]

INVALID, BUSY, BROKEN = "invalid_request_error", "rate_limit_error", "server_error"
CONTEXT = "context_length_exceeded"  # the OpenAI API's code for too many tokens
CLOSE = {"Connection": "close"}  # for errors sent before the whole body arrived
SENTENCES = {404: "there is nothing at this path; GET /openapi.json lists all paths"}


class ResponseError(Exception):
    """Error that is sent to the client as a response.

    Args:
        status: HTTP status.
        message: one sentence: what was given, what is allowed, what to do.
        param: name of the invalid field.
        code: machine-readable code.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """``type`` of the OpenAI API for the status."""
        return BROKEN if self.status >= 500 else BUSY if self.status == 429 else INVALID


def to_response_error(error: Exception) -> ResponseError:
    """Convert any exception to the one that is sent to the client.

    Example:
        >>> to_response_error(QueueFullError(64, retry_after_s=3)).headers
        {'Retry-After': '3'}
    """
    match error:
        case ResponseError():
            return error
        case HTTPException():
            sentence = SENTENCES.get(error.status_code, error.detail.lower())
            return ResponseError(error.status_code, sentence, headers=error.headers)
        case QueueFullError():
            headers = {"Retry-After": f"{error.retry_after_s:.0f}"}
            return ResponseError(429, str(error), code="rate_limit_exceeded", headers=headers)
        case ClosedError():
            return ResponseError(503, str(error), code="draining")
        case OctavoError():
            return ResponseError(400, str(error), param=error.field if isinstance(error, FieldError) else None)
        case _:
            return ResponseError(500, "internal error; see the server's log")


def error_body(error: ResponseError, path: str) -> dict[str, Any]:
    """Body of an error response, in the format of the protocol at ``path``."""
    if path.startswith("/v2"):
        return {"error": error.message}
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: ResponseError, path: str) -> JSONResponse:
    """Error response for the protocol at ``path``."""
    return JSONResponse(error_body(error, path), error.status, error.headers)


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for starlette."""
    return error_response(to_response_error(error), request.url.path)


def check_event(event: Event) -> Event:
    """Return the event unless its answer failed.

    Raises:
        ResponseError: the answer failed, or the server cancelled it.
    """
    if event.finish is FinishReason.ERROR:
        raise ResponseError(500, event.error or "the answer failed")
    if event.finish is FinishReason.CANCELLED:
        raise ResponseError(503, "the server cancelled this answer to shut down; use another server", code="draining")
    return event
