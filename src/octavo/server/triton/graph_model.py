"""Model ``onnx`` of the repository: an exported graph in onnxruntime on a CPU, as a Python model of Triton.

Triton's dynamic batcher passes requests whose tensors have equal shapes except in the first dimension; they run as one
batch. If that fails, each runs alone, so that a token id outside the vocabulary fails only the request that has it.
This file is copied into the repository unchanged; it needs onnxruntime, but neither octavo nor torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TritonPythonModel"]

GRAPH = "model.onnx"  # beside this file


class TritonPythonModel:
    """Interface that Triton's Python backend calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the graph without fusing QuantizeLinear and DequantizeLinear, which onnxruntime cannot do in FP8."""
        import onnxruntime
        import triton_python_backend_utils as utils

        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        path = Path(args["model_repository"]) / args["model_version"] / GRAPH
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._utils = utils

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request."""
        inputs = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        try:
            results = self._run({name: np.concatenate([each[name] for each in inputs]) for name in inputs[0]})
        except Exception as error:  # noqa: BLE001 -- onnxruntime's exceptions have no common base
            if len(requests) == 1:
                return [self._utils.InferenceResponse(error=self._utils.TritonError(str(error)))]
            return [response for request in requests for response in self.execute([request])]
        ends = np.cumsum([len(next(iter(each.values()))) for each in inputs])
        parts = zip(*(np.split(result, ends[:-1]) for result in results), strict=True)
        return [self._response(part) for part in parts]

    def _run(self, feed: Mapping[str, Any]) -> list[Any]:
        outputs: list[Any] = self._session.run(self._outputs, feed)
        return outputs

    def _response(self, arrays: Sequence[Any]) -> Any:
        tensors = [self._utils.Tensor(name, array) for name, array in zip(self._outputs, arrays, strict=True)]
        return self._utils.InferenceResponse(output_tensors=tensors)
