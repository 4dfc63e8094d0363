"""KServe's protocol v2 over HTTP, as Triton Inference Server speaks it, so that a client can move there unchanged.

| path (also with ``/versions/1``)    | what                                                              |
|-------------------------------------|-------------------------------------------------------------------|
| GET /v2, /v2/health/live, /ready    | the server                                                        |
| GET /v2/models/M, /v2/models/M/ready| the model and its tensors                                         |
| POST /v2/models/M/infer             | tensors in, a tensor out; in JSON or as bytes (tensors.py)        |
| POST /v2/models/M/generate          | the same fields in plain JSON                                     |
| POST /v2/models/M/generate_stream   | the same, as server-sent events                                   |

``text_input`` may hold several prompts, and every other tensor one value for all of them or one for each; ``stop``
holds the texts before which each answer ends.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.answers import Asked, merged, server_sent, started
from octavo.server.fields import Field, FieldError, Record, Text, Whole
from octavo.server.operations import EVENTS, Operation, body_of
from octavo.server.refusals import Refusal
from octavo.server.sampling_fields import params_of, sampling_fields
from octavo.server.service import Service, State
from octavo.server.tensors import HEADER_LENGTH, INFER, Tensor, pack, unpack

__all__ = ["KServe"]

MAX_TOKENS = 16  # where a request does not say
INPUT, OUTPUT, VERSION = "text_input", "text_output", "1"
DATATYPES = {
    INPUT: "BYTES",
    "max_tokens": "INT32",
    "temperature": "FP32",
    "top_p": "FP32",
    "top_k": "INT32",
    "min_p": "FP32",
    "seed": "INT64",
    "stop": "BYTES",
    "ignore_eos": "BOOL",
}
EXTENSIONS = ("generate", "binary_tensor_data")


class KServe:
    """The surface of protocol v2."""

    def __init__(self, service: Service) -> None:
        self._service, self._body = service, _fields(service)

    def operations(self) -> list[Operation]:
        """Of the surface."""
        listed = [
            Operation(method="GET", path="/v2", run=self.server, about="The server"),
            Operation(method="GET", path="/v2/health/live", run=self.live, about="Whether it runs", answers=()),
            Operation(method="GET", path="/v2/health/ready", run=self.ready, about="Whether it answers", answers=()),
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
        """What the server is."""
        return JSONResponse({"name": "octavo", "version": VERSION, "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:
        """200 while the process runs."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """200 while it takes requests."""
        return Response(status_code=200 if self._service.state is State.READY else 503)

    async def model_ready(self, request: Request) -> Response:
        """The same of the model, which is there whenever the server is."""
        self._check(request)
        return await self.ready(request)

    async def model(self, request: Request) -> Response:
        """Names and types of its tensors."""
        self._check(request)
        inputs = [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in DATATYPES.items()]
        outputs = [{"name": OUTPUT, "datatype": "BYTES", "shape": [-1]}]
        head = {"name": self._service.name, "versions": [VERSION], "platform": "octavo"}
        return JSONResponse(head | {"inputs": inputs, "outputs": outputs})

    async def generate(self, request: Request) -> Response:
        """One answer."""
        (text,) = await self._texts(request, [await self._plain(request)])
        return JSONResponse(self._head() | {OUTPUT: text})

    async def stream(self, request: Request) -> Response:
        """One answer, piece by piece."""
        streams = await started(request, self._service, [await self._asked(await self._plain(request))])

        async def pieces() -> AsyncIterator[dict[str, Any]]:
            async with aclosing(merged(streams)) as events:
                async for _, event in events:
                    if event.text:
                        yield self._head() | {OUTPUT: event.text}

        return server_sent(pieces(), path=request.url.path)

    async def infer(self, request: Request) -> Response:
        """An answer for each text of a tensor."""
        self._check(request)
        sent = unpack(await request.body(), request.headers.get(HEADER_LENGTH))
        if unknown := sorted(sent.binary.keys() - {OUTPUT}):
            raise Refusal(400, f"there is no output {ascii(unknown[0])[:80]}; {OUTPUT!r} is all", param="outputs")
        texts = await self._texts(request, self._bodies(sent.tensors))
        head = self._head() | ({} if sent.id is None else {"id": sent.id})
        body, headers = pack(head, OUTPUT, texts, binary=sent.binary.get(OUTPUT, sent.binary_by_default))
        media = "application/octet-stream" if headers else "application/json"
        return Response(body, headers=headers, media_type=media)

    def _head(self) -> dict[str, Any]:
        return {"model_name": self._service.name, "model_version": VERSION}

    def _check(self, request: Request) -> None:
        self._service.check_model(request.path_params["model"])
        if request.path_params.get("version", VERSION) != VERSION:
            raise Refusal(404, f"{self._service.name!r} has version {VERSION} alone")

    async def _plain(self, request: Request) -> dict[str, Any]:
        self._check(request)
        return await body_of(request, self._body)

    async def _asked(self, body: dict[str, Any]) -> Asked:
        ids = await asyncio.to_thread(self._service.encode, body[INPUT])
        return Asked(ids, params_of(body, self._service, choice=0, max_tokens=body["max_tokens"], logprobs=None))

    async def _texts(self, request: Request, bodies: Sequence[dict[str, Any]]) -> list[str]:
        streams = await started(request, self._service, [await self._asked(body) for body in bodies])
        texts = ["" for _ in streams]
        async for index, event in merged(streams):
            texts[index] += event.text
        return texts

    def _bodies(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Fields as :meth:`generate` has them, for each text."""
        for name, tensor in tensors.items():
            if tensor.datatype != DATATYPES.get(name, tensor.datatype):
                raise FieldError(ascii(name), f"is a tensor of {DATATYPES[name]}, not {tensor.datatype}")
        count = len(tensors[INPUT].values) if INPUT in tensors else 1
        if not 1 <= count <= self._service.choices:
            raise FieldError(INPUT, f"holds from 1 to {self._service.choices} texts, not {count}")
        return [self._body.read(_row(tensors, i, count)) for i in range(count)]


def _row(tensors: Mapping[str, Tensor], index: int, count: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, tensor in tensors.items():
        values = tensor.values
        if name == "stop":
            row[name] = values
        elif len(values) not in {1, count}:
            raise FieldError(ascii(name), f"has {len(values)} values for {count} texts; send one, or one for each")
        else:
            row[name] = values[index % len(values)]
    return row


def _fields(service: Service) -> Record:
    most = Whole(least=1, most=service.max_tokens)
    own = (
        Field(name=INPUT, kind=Text(), required=True, about="the prompt"),
        Field(name="max_tokens", kind=most, default=MAX_TOKENS, about="of the answer"),
    )
    return Record(fields=(*own, *(field for field in sampling_fields(service) if field.name in DATATYPES)))
