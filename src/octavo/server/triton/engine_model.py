"""The repository's model ``octavo``: octavo's engine as a Python model of Triton's, decoupled.

Triton hands requests over and goes on; the engine's thread sends each of them its pieces of text as they become
certain, and an empty last response. What a request may hold, and what it is refused with, is what octavo's own server
has under ``/v2`` (octavo.server.kserve_fields), so that both give the same text for the same tensors.

config.pbtxt's parameters are whole numbers of ``octavo.inference.EngineConfig``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.inference import EngineConfig, Event, load_served_model
from octavo.parsing import parse_json
from octavo.server import Limits, Service
from octavo.server.fields import FieldError
from octavo.server.kserve_fields import DATATYPES, INPUT, OUTPUT, asked, bodies, fields
from octavo.server.refusals import Refusal, check_event, refusal_of
from octavo.server.tensors import Tensor

__all__ = ["FOLDER", "TritonPythonModel"]

FOLDER = "model"  # beside model.py
CODES = {400: "INVALID_ARG", 429: "UNAVAILABLE", 500: "INTERNAL", 503: "UNAVAILABLE"}


class TritonPythonModel:
    """What Triton's Python backend makes one instance of, and calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model; Triton's server is not ready before."""
        import triton_python_backend_utils as utils

        self._utils = utils
        given = parse_json(args["model_config"])["parameters"]
        settings: dict[str, Any] = {name: int(value["string_value"]) for name, value in given.items()}
        served = load_served_model(Path(args["model_repository"]) / args["model_version"] / FOLDER)
        served = replace(served, chat_template=None)  # protocol v2 has no messages
        self._service = Service.of(served, args["model_name"], config=EngineConfig(**settings), limits=Limits())
        self._record = fields(self._service)

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin to answer; responses go through each request's own sender."""
        for request in requests:
            answer = _Answer(request.get_response_sender(), self._service, self._utils)
            try:
                (body,) = bodies(_tensors(request), self._record, most=1)
                wanted = asked(self._service, body, self._service.encode(body[INPUT], field=INPUT))
                answer.begin(self._service.thread.engine.submit(wanted.prompt_ids, wanted.params, answer.tell))
            except Exception as error:  # noqa: BLE001 -- refusal_of says of each what whoever asked may know
                answer.refuse(error)

    def finalize(self) -> None:
        """Answer what was begun, for as long as Triton waits anyway."""
        self._service.thread.drain(self._service.limits.drain_s)


class _Answer:
    """The responses to one request."""

    def __init__(self, sender: Any, service: Service, utils: Any) -> None:
        self._sender, self._service, self._utils = sender, service, utils
        self._request: Any = None  # of the engine's; its first events may come before it is known
        self._is_unwanted = False

    def begin(self, request: Any) -> None:
        """Know which request it is that is answered."""
        self._request = request
        if self._is_unwanted:
            self._give_up()

    def tell(self, event: Event) -> None:
        """Send what an event adds; called by the engine's thread, between its steps."""
        try:
            if event.finish is None and self._sender.is_cancelled():
                self._give_up()
            if event.text:
                self._sender.send(self._response(event.text))
            if event.finish is not None:
                self._end(event)
        except self._utils.TritonModelException:  # Triton has no use for the answer any more
            self._give_up()

    def _give_up(self) -> None:
        self._is_unwanted = True
        if self._request is not None:
            self._service.thread.engine.cancel(self._request)

    def refuse(self, error: Exception) -> None:
        """Send a sentence instead."""
        refusal = refusal_of(error)
        if refusal.status >= 500 and not isinstance(error, Refusal):
            self._utils.Logger.log_error(f"{type(error).__name__}: {error}")
        code = getattr(self._utils.TritonError, CODES[refusal.status])
        error = self._utils.TritonError(refusal.message, code)
        self._send_last(self._utils.InferenceResponse(error=error))

    def _end(self, event: Event) -> None:
        try:
            check_event(event)
        except Refusal as refusal:
            self.refuse(refusal)
        else:
            self._send_last()

    def _send_last(self, *response: Any) -> None:
        self._sender.send(*response, flags=self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, text: str) -> Any:
        value = np.array([text.encode()], dtype=np.object_)
        return self._utils.InferenceResponse(output_tensors=[self._utils.Tensor(OUTPUT, value)])


def _tensors(request: Any) -> dict[str, Tensor]:
    """A request's, as octavo's server reads them; Triton has checked their names and types."""
    found = {}
    for tensor in request.inputs():
        array, name = tensor.as_numpy(), tensor.name()
        values = array.reshape(-1).tolist()
        if DATATYPES[name] == "BYTES":
            values = [_text(name, value) for value in values]
        found[name] = Tensor(DATATYPES[name], [*array.shape], values)
    return found


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise FieldError(name, f"has bytes that are no UTF-8: {error}") from error
