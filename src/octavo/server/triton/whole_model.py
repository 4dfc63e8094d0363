"""Model ``octavo_whole`` of the repository: sends requests to ``octavo`` and joins the pieces of each answer.

Triton supports plain ``infer`` requests over HTTP and gRPC only for models with one response per request; this model is
for clients that use them. Several texts become concurrent requests to ``octavo``. This file is copied into the
repository unchanged; it needs neither octavo nor torch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["TritonPythonModel"]

ENGINE, INPUT, OUTPUT, SHARED = "octavo", "text_input", "text_output", "stop"


class TritonPythonModel:
    """Interface that Triton's Python backend calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Import Triton's utilities; there is no model to load."""
        import triton_python_backend_utils as utils

        self._utils = utils

    async def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request."""
        return [*await asyncio.gather(*(self._answer(request) for request in requests))]

    async def _answer(self, request: Any) -> Any:
        arrays = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
        count = len(arrays[INPUT])
        try:
            texts = await asyncio.gather(*(self._text(arrays, i, count) for i in range(count)))
        except self._utils.TritonModelException as error:
            return self._utils.InferenceResponse(error=self._utils.TritonError(str(error)))
        value = np.array(texts, dtype=np.object_)
        return self._utils.InferenceResponse(output_tensors=[self._utils.Tensor(OUTPUT, value)])

    async def _text(self, arrays: Mapping[str, Any], index: int, count: int) -> bytes:
        """Return one answer; raise TritonModelException with the engine's error."""
        inputs = [self._utils.Tensor(name, _value_of(name, array, index, count)) for name, array in arrays.items()]
        request = self._utils.InferenceRequest(model_name=ENGINE, requested_output_names=[OUTPUT], inputs=inputs)
        return b"".join(await asyncio.to_thread(self._pieces, request))

    def _pieces(self, request: Any) -> list[bytes]:
        pieces = []
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise self._utils.TritonModelException(response.error().message())
            for tensor in response.output_tensors():
                pieces += tensor.as_numpy().tolist()
        return pieces


def _value_of(name: str, array: Any, index: int, count: int) -> Any:
    """Value of one text in a tensor with one per text; the engine refuses other numbers of values."""
    return array[index : index + 1] if len(array) == count > 1 and name != SHARED else array
