"""KServe's protocol v2 over HTTP, compatible with clients of Triton Inference Server.

| path (also with ``/versions/1``)    | what                                                              |
|-------------------------------------|-------------------------------------------------------------------|
| GET /v2, /v2/health/live, /ready    | the server                                                        |
| GET /v2/models/M, /v2/models/M/ready| the model and its tensors                                         |
| POST /v2/models/M/infer             | tensors in, a tensor out; in JSON or as bytes (tensors.py)        |
| POST /v2/models/M/generate          | the same fields in plain JSON                                     |
| POST /v2/models/M/generate_stream   | the same, as server-sent events                                   |

The tensors are those of kserve_fields.py.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.error_responses import ResponseError
from octavo.server.kserve_fields import DATATYPES, INPUT, OUTPUT, answer_request, read_bodies, request_fields
from octavo.server.operations import EVENTS, Operation, body_of, bytes_of
from octavo.server.responses import AnswerRequest, event_stream, merge_events, start_answers
from octavo.server.service import Service, State
from octavo.server.tensors import HEADER_LENGTH, INFER, pack, unpack

__all__ = ["KServe"]

VERSION = "1"
EXTENSIONS = ("generate", "binary_tensor_data")


class KServe:
    """Endpoints of protocol v2."""

    def __init__(self, service: Service) -> None:
        self._service, self._body = service, request_fields(service)

    def operations(self) -> list[Operation]:
        """Return the operations."""
        listed = [
            Operation(method="GET", path="/v2", run=self.server, about="The server"),
            Operation(method="GET", path="/v2/health/live", run=self.live, about="Is the server alive?", answers=()),
            Operation(method="GET", path="/v2/health/ready", run=self.ready, about="Is the server ready?", answers=()),
        ]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            listed += self._of_the_model(path)
        return listed

    def _of_the_model(self, path: str) -> list[Operation]:
        body = self._body
        return [
            Operation(method="GET", path=path, run=self.model, about="The model's tensors"),
            Operation(method="GET", path=f"{path}/ready", run=self.model_ready, about="Is it ready?", answers=()),
            Operation(method="POST", path=f"{path}/infer", run=self.infer, about="Answer tensors", body=INFER),
            Operation(method="POST", path=f"{path}/generate", run=self.generate, about="Answer", body=body),
            Operation(
                method="POST",
                path=f"{path}/generate_stream",
                run=self.stream,
                about="Answer as server-sent events",
                body=body,
                answers=(EVENTS,),
            ),
        ]

    async def server(self, request: Request) -> Response:
        """Return the server's name, version and extensions."""
        return JSONResponse({"name": "octavo", "version": VERSION, "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:
        """Return 200 while the process runs."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """Return 200 while requests are accepted, else 503."""
        return Response(status_code=200 if self._service.state is State.READY else 503)

    async def model_ready(self, request: Request) -> Response:
        """Return the server's readiness; its model is always loaded."""
        self._check(request)
        return await self.ready(request)

    async def model(self, request: Request) -> Response:
        """Return the names and types of the model's tensors."""
        self._check(request)
        inputs = [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in DATATYPES.items()]
        outputs = [{"name": OUTPUT, "datatype": "BYTES", "shape": [-1]}]
        head = {"name": self._service.name, "versions": [VERSION], "platform": "octavo"}
        return JSONResponse(head | {"inputs": inputs, "outputs": outputs})

    async def generate(self, request: Request) -> Response:
        """Return one answer."""
        (text,) = await self._texts(request, [await self._plain(request)])
        return JSONResponse(self._head() | {OUTPUT: text})

    async def stream(self, request: Request) -> Response:
        """Stream one answer."""
        streams = await start_answers(request, self._service, [await self._answer_request(await self._plain(request))])

        async def pieces() -> AsyncIterator[dict[str, Any]]:
            async with aclosing(merge_events(streams)) as events:
                async for _, event in events:
                    if event.text:
                        yield self._head() | {OUTPUT: event.text}

        return event_stream(pieces(), path=request.url.path)

    async def infer(self, request: Request) -> Response:
        """Answer each text of the input tensor."""
        self._check(request)
        infer = unpack(await bytes_of(request), request.headers.get(HEADER_LENGTH))
        if unknown := sorted(infer.binary.keys() - {OUTPUT}):
            raise ResponseError(400, f"there is no output {ascii(unknown[0])[:80]}, only {OUTPUT!r}", param="outputs")
        texts = await self._texts(request, read_bodies(infer.tensors, self._body, most=self._service.choices))
        head = self._head() | ({} if infer.id is None else {"id": infer.id})
        body, headers = pack(head, OUTPUT, texts, binary=infer.binary.get(OUTPUT, infer.binary_by_default))
        media = "application/octet-stream" if headers else "application/json"
        return Response(body, headers=headers, media_type=media)

    def _head(self) -> dict[str, Any]:
        return {"model_name": self._service.name, "model_version": VERSION}

    def _check(self, request: Request) -> None:
        self._service.check_model(request.path_params["model"])
        if request.path_params.get("version", VERSION) != VERSION:
            raise ResponseError(404, f"{self._service.name!r} has only version {VERSION}")

    async def _plain(self, request: Request) -> dict[str, Any]:
        self._check(request)
        return await body_of(request, self._body)

    async def _answer_request(self, body: dict[str, Any]) -> AnswerRequest:
        return answer_request(self._service, body, await self._service.tokens(body[INPUT], field=INPUT))

    async def _texts(self, request: Request, bodies: Sequence[dict[str, Any]]) -> list[str]:
        streams = await start_answers(request, self._service, [await self._answer_request(body) for body in bodies])
        texts = ["" for _ in streams]
        async for index, event in merge_events(streams):
            texts[index] += event.text
        return texts
