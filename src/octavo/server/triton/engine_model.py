"""Model ``octavo`` of the repository: octavo's engine as a decoupled Python model of Triton.

``execute`` returns at once; the engine's thread sends each request its pieces of text as they become final, and an
empty last response. Inputs and errors are those of octavo's own server under ``/v2`` (octavo.server.kserve_fields), so
both return the same text for the same tensors.

The parameters in config.pbtxt are the integers of ``octavo.inference.EngineConfig``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.inference import EngineConfig, Event, load_served_model
from octavo.parsing import parse_json
from octavo.server import Limits, Service
from octavo.server.error_responses import ResponseError, check_event, to_response_error
from octavo.server.fields import FieldError
from octavo.server.kserve_fields import DATATYPES, INPUT, OUTPUT, answer_request, read_bodies, request_fields
from octavo.server.tensors import KServeTensor

__all__ = ["FOLDER", "TritonPythonModel"]

FOLDER = "model"  # beside model.py
CODES = {400: "INVALID_ARG", 429: "UNAVAILABLE", 500: "INTERNAL", 503: "UNAVAILABLE"}


class TritonPythonModel:
    """Interface that Triton's Python backend calls; it creates one instance."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model; Triton's server is ready afterwards."""
        import triton_python_backend_utils as utils

        self._utils = utils
        parameters = parse_json(args["model_config"])["parameters"]
        settings: dict[str, Any] = {name: int(value["string_value"]) for name, value in parameters.items()}
        served = load_served_model(Path(args["model_repository"]) / args["model_version"] / FOLDER)
        served = replace(served, chat_template=None)  # protocol v2 has no messages
        self._service = Service.of(served, args["model_name"], config=EngineConfig(**settings), limits=Limits())
        self._record = request_fields(self._service)

    def execute(self, requests: Sequence[Any]) -> None:
        """Submit requests to the engine; responses go through each request's sender."""
        for request in requests:
            answer = _ResponseSender(request.get_response_sender(), self._service, self._utils)
            try:
                (body,) = read_bodies(_tensors(request), self._record, most=1)
                parsed = answer_request(self._service, body, self._service.encode(body[INPUT], field=INPUT))
                answer.begin(self._service.thread.engine.submit(parsed.prompt_ids, parsed.params, answer.send))
            except Exception as error:  # noqa: BLE001 -- to_response_error converts each to a response
                answer.fail(error)

    def finalize(self) -> None:
        """Finish running answers, for as long as Triton waits."""
        self._service.thread.drain(self._service.limits.drain_s)


class _ResponseSender:
    """Sender of the responses to one request."""

    def __init__(self, sender: Any, service: Service, utils: Any) -> None:
        self._sender, self._service, self._utils = sender, service, utils
        self._request: Any = None  # the engine's request; its first events may come before it is set
        self._is_cancelled = False

    def begin(self, request: Any) -> None:
        """Set the engine's request, which is cancelled with this one."""
        self._request = request
        if self._is_cancelled:
            self._cancel()

    def send(self, event: Event) -> None:
        """Send the text of an event; called by the engine's thread between steps."""
        try:
            if event.finish is None and self._sender.is_cancelled():
                self._cancel()
            if event.text:
                self._sender.send(self._response(event.text))
            if event.finish is not None:
                self._end(event)
        except self._utils.TritonModelException:  # Triton no longer accepts responses
            self._cancel()

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._request is not None:
            self._service.thread.engine.cancel(self._request)

    def fail(self, error: Exception) -> None:
        """Send an error as the last response."""
        response_error = to_response_error(error)
        if response_error.status >= 500 and not isinstance(error, ResponseError):
            self._utils.Logger.log_error(f"{type(error).__name__}: {error}")
        code = getattr(self._utils.TritonError, CODES[response_error.status])
        triton_error = self._utils.TritonError(response_error.message, code)
        self._send_last(self._utils.InferenceResponse(error=triton_error))

    def _end(self, event: Event) -> None:
        try:
            check_event(event)
        except ResponseError as error:
            self.fail(error)
        else:
            self._send_last()

    def _send_last(self, *response: Any) -> None:
        self._sender.send(*response, flags=self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, text: str) -> Any:
        value = np.array([text.encode()], dtype=np.object_)
        return self._utils.InferenceResponse(output_tensors=[self._utils.Tensor(OUTPUT, value)])


def _tensors(request: Any) -> dict[str, KServeTensor]:
    """Input tensors of a request; Triton has checked their names and types."""
    tensors = {}
    for tensor in request.inputs():
        array, name = tensor.as_numpy(), tensor.name()
        values = array.reshape(-1).tolist()
        if DATATYPES[name] == "BYTES":
            values = [_text(name, value) for value in values]
        tensors[name] = KServeTensor(DATATYPES[name], [*array.shape], values)
    return tensors


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise FieldError(name, f"has bytes that are not UTF-8: {error}") from error
