"""The repository's model ``octavo_whole``: asks ``octavo`` and puts the pieces of each answer together.

Triton answers plain ``infer`` requests of HTTP and gRPC only for models with one response a request, so a client that
waits for whole answers asks here. Several texts are several requests to ``octavo``, answered side by side. This file
is copied into the repository as it is; it needs neither octavo nor torch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["TritonPythonModel"]

ENGINE, INPUT, OUTPUT, SHARED = "octavo", "text_input", "text_output", "stop"


class TritonPythonModel:
    """What Triton's Python backend makes instances of, and calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Nothing is loaded."""
        import triton_python_backend_utils as utils

        self._utils = utils

    async def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request."""
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
        """One answer; raises TritonModelException with the engine's sentence where there is none."""
        inputs = [self._utils.Tensor(name, _own(name, array, index, count)) for name, array in arrays.items()]
        asked = self._utils.InferenceRequest(model_name=ENGINE, requested_output_names=[OUTPUT], inputs=inputs)
        return b"".join(await asyncio.to_thread(self._pieces, asked))

    def _pieces(self, asked: Any) -> list[bytes]:
        found = []
        for response in asked.exec(decoupled=True):
            if response.has_error():
                raise self._utils.TritonModelException(response.error().message())
            for tensor in response.output_tensors():
                found += tensor.as_numpy().tolist()
        return found


def _own(name: str, array: Any, index: int, count: int) -> Any:
    """One text's value of a tensor that has one for each; the engine refuses other numbers of values."""
    return array[index : index + 1] if len(array) == count > 1 and name != SHARED else array
