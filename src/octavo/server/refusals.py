"""Everything a server says no with: a status, one sentence, and the shape that each protocol gives it.

| who asks                | the body of a refusal                                                        |
|-------------------------|------------------------------------------------------------------------------|
| OpenAI's API, and all   | ``{"error": {"message": …, "type": …, "param": …, "code": …}}``              |
| KServe's, under ``/v2`` | ``{"error": …}``, the sentence alone: its clients take nothing else          |

A traceback never leaves the server: what octavo did not expect is "server_error" for whoever asked, and stands in the
server's own log.
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
CONTEXT = "context_length_exceeded"  # the OpenAI API's word for too many tokens
CLOSE = {"Connection": "close"}  # where the rest of a body may still be on its way
SENTENCES = {404: "there is nothing at this path; GET /openapi.json lists what there is"}


class Refusal(Exception):  # noqa: N818 -- what is answered; octavo.errors has what goes wrong
    """An answer that is a no.

    Args:
        status: of HTTP.
        message: one sentence: given, allowed, what to do.
        param: the field it is about.
        code: a word for programs.
        headers: of the response.
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
        """The OpenAI API's word for the status."""
        return BROKEN if self.status >= 500 else BUSY if self.status == 429 else INVALID


def refusal_of(error: Exception) -> Refusal:
    """What is answered when an exception was raised.

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
            return Refusal(500, "the server made a mistake, and its log says which")


def refusal_body(refusal: Refusal, path: str) -> dict[str, Any]:
    """What is written, in the shape that those who ask at ``path`` understand."""
    if path.startswith("/v2"):
        return {"error": refusal.message}
    own = {"message": refusal.message, "type": refusal.type, "param": refusal.param, "code": refusal.code}
    return {"error": own}


def refusal_response(refusal: Refusal, path: str) -> JSONResponse:
    """As a whole response."""
    return JSONResponse(refusal_body(refusal, path), refusal.status, refusal.headers)


async def answer_refusal(request: Request, error: Exception) -> JSONResponse:
    """For starlette, which calls this with what an endpoint raised."""
    return refusal_response(refusal_of(error), request.url.path)


def check_event(event: Event) -> Event:
    """An event of an answer that goes well.

    Raises:
        Refusal: the answer broke, or was ended by the server.
    """
    if event.finish is FinishReason.ERROR:
        raise Refusal(500, event.error or "the answer broke")
    if event.finish is FinishReason.CANCELLED:
        raise Refusal(503, "the server ended this answer to shut down; ask another", code="draining")
    return event
