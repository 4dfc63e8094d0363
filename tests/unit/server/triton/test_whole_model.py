"""The model that puts pieces together, with an engine that is a function."""

import asyncio

import numpy as np
import pytest

from octavo.server.triton.whole_model import TritonPythonModel
from tests.unit.server.triton.conftest import InferenceResponse, Request, Tensor, TritonError


@pytest.fixture
def model(utils):
    """Each text is answered by its letters, as often as its max_tokens say, a letter at a time."""

    class InferenceRequest:
        def __init__(self, *, model_name, requested_output_names, inputs):
            assert (model_name, requested_output_names) == ("octavo", ["text_output"])
            self.arrays = {tensor.name(): tensor.as_numpy() for tensor in inputs}

        def exec(self, *, decoupled):
            assert decoupled
            (text,) = self.arrays["text_input"].tolist()
            (count,) = self.arrays.get("max_tokens", np.array([1])).tolist()
            yield InferenceResponse()  # the last response of a request may be an empty one, or come first
            for letter in text.decode() * count:
                yield InferenceResponse([Tensor("text_output", np.array([letter.encode()], np.object_))])
            if "stop" in self.arrays:
                yield InferenceResponse(error=TritonError(f"no stops: {self.arrays['stop'].tolist()}"))

    utils.InferenceRequest = InferenceRequest
    made = TritonPythonModel()
    made.initialize({})
    return made


def texts(response):
    return response.output_tensors()[0].as_numpy().tolist()


def test_pieces_are_joined_per_text(model):
    requests = [
        Request(text_input="ab"),
        Request(text_input=["ab", "c"], max_tokens=[1, 3]),
        Request(text_input=["ab", "c"], max_tokens=2),
    ]
    found = asyncio.run(model.execute(requests))
    assert [texts(response) for response in found] == [[b"ab"], [b"ab", b"ccc"], [b"abab", b"cc"]]


def test_error_fails_only_its_request(model):
    found = asyncio.run(model.execute([Request(text_input=["a", "b"], stop=["x", "y"]), Request(text_input="c")]))
    assert found[0].error().message() == "no stops: [b'x', b'y']"
    assert texts(found[1]) == [b"c"]
