"""``/v1/models``, ``/tokenize`` and ``/health``: what is served, how it counts, and whether it answers."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.fields import Field, Flag, Record, Text
from octavo.server.operations import Operation, body_of
from octavo.server.service import Service, State

__all__ = ["Models"]


class Models:
    """The surface of the model itself."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = Record(
            fields=(
                Field(name="model", kind=Text(), about=f"the one model served, {service.name!r}"),
                Field(name="prompt", kind=Text(), required=True),
                Field(name="add_special_tokens", kind=Flag(), default=True, about="as a completion's prompt has them"),
            )
        )

    def operations(self) -> list[Operation]:
        """Of the surface."""
        return [
            Operation(method="GET", path="/health", run=self.health, about="Ready, draining or broken"),
            Operation(method="GET", path="/v1/models", run=self.all, about="The models, which is one"),
            Operation(method="GET", path="/v1/models/{model}", run=self.one, about="One model"),
            Operation(
                method="POST", path="/tokenize", run=self.tokenize, about="The tokens of a text", body=self._body
            ),
        ]

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, and 503 otherwise."""
        state = self._service.state
        return JSONResponse({"status": state}, 200 if state is State.READY else 503)

    async def all(self, request: Request) -> Response:
        """A list of one."""
        return JSONResponse({"object": "list", "data": [self._record()]})

    async def one(self, request: Request) -> Response:
        """The one."""
        self._service.check_model(request.path_params["model"])
        return JSONResponse(self._record())

    async def tokenize(self, request: Request) -> Response:
        """Ids and their number."""
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
