"""``/v1/models``, ``/tokenize`` and ``/health``."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.fields import Boolean, Field, JsonObject, String
from octavo.server.operations import Operation, body_of
from octavo.server.service import Service, State

__all__ = ["Models"]


class Models:
    """Model, tokenizer and health endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = JsonObject(
            fields=(
                Field(name="model", kind=String(), about=f"name of the model, {service.name!r}"),
                Field(name="prompt", kind=String(), required=True),
                Field(
                    name="add_special_tokens",
                    kind=Boolean(),
                    default=True,
                    about="add special tokens, as for a completion's prompt",
                ),
            )
        )

    def operations(self) -> list[Operation]:
        """Return the operations."""
        return [
            Operation(method="GET", path="/health", run=self.health, about="Ready, draining or broken"),
            Operation(method="GET", path="/v1/models", run=self.all, about="List the models; there is one"),
            Operation(method="GET", path="/v1/models/{model}", run=self.one, about="One model"),
            Operation(method="POST", path="/tokenize", run=self.tokenize, about="Tokenize a text", body=self._body),
        ]

    async def health(self, request: Request) -> Response:
        """Return the state, with 200 while requests are accepted and 503 otherwise."""
        state = self._service.state
        return JSONResponse({"status": state}, 200 if state is State.READY else 503)

    async def all(self, request: Request) -> Response:
        """Return the list of models, which has one entry."""
        return JSONResponse({"object": "list", "data": [self._record()]})

    async def one(self, request: Request) -> Response:
        """Return one model."""
        self._service.check_model(request.path_params["model"])
        return JSONResponse(self._record())

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text and their number."""
        body = await body_of(request, self._body)
        if body["model"] is not None:
            self._service.check_model(body["model"])
        ids = await self._service.tokens(body["prompt"], field="prompt", add_special_tokens=body["add_special_tokens"])
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._service.thread.engine.positions})

    def _record(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "octavo",
            "max_model_len": service.thread.engine.positions,
            "max_tokens": service.max_tokens,
            "chat_template": service.template is not None,
        }
