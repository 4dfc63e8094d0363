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

__all__ = ["CONTEXT", "Refusal", "answer_refusal", "check_event", "refusal_body", "refusal_of", "refusal_response"]

INVALID, BUSY, BROKEN = "invalid_request_error", "rate_limit_error", "server_error"
CONTEXT = "context_length_exceeded"  # the OpenAI API's code for too many tokens
CLOSE = {"Connection": "close"}  # for refusals sent before the whole body arrived
SENTENCES = {404: "there is nothing at this path; GET /openapi.json lists all paths"}


class Refusal(Exception):  # noqa: N818 -- a response, unlike the errors of octavo.errors
    """Error response to a request.

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


def refusal_of(error: Exception) -> Refusal:
    """Convert an exception to an error response.

    Example:
        >>> refusal_of(QueueFullError(64, retry_after_s=3)).headers
        {'Retry-After': '3'}
    """
    match error:
        case Refusal():
            return error
        case HTTPException():
            sentence = SENTENCES.get(error.status_code, error.detail.lower())
            return Refusal(error.status_code, sentence, headers=error.headers)
        case QueueFullError():
            headers = {"Retry-After": f"{error.retry_after_s:.0f}"}
            return Refusal(429, str(error), code="rate_limit_exceeded", headers=headers)
        case ClosedError():
            return Refusal(503, str(error), code="draining")
        case OctavoError():
            return Refusal(400, str(error), param=error.field if isinstance(error, FieldError) else None)
        case _:
            return Refusal(500, "internal error; see the server's log")


def refusal_body(refusal: Refusal, path: str) -> dict[str, Any]:
    """Body of an error response, in the format of the protocol at ``path``."""
    if path.startswith("/v2"):
        return {"error": refusal.message}
    error = {"message": refusal.message, "type": refusal.type, "param": refusal.param, "code": refusal.code}
    return {"error": error}


def refusal_response(refusal: Refusal, path: str) -> JSONResponse:
    """Error response for the protocol at ``path``."""
    return JSONResponse(refusal_body(refusal, path), refusal.status, refusal.headers)


async def answer_refusal(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for starlette."""
    return refusal_response(refusal_of(error), request.url.path)


def check_event(event: Event) -> Event:
    """Return the event unless its answer failed.

    Raises:
        Refusal: the answer failed, or the server cancelled it.
    """
    if event.finish is FinishReason.ERROR:
        raise Refusal(500, event.error or "the answer failed")
    if event.finish is FinishReason.CANCELLED:
        raise Refusal(503, "the server cancelled this answer to shut down; use another server", code="draining")
    return event
