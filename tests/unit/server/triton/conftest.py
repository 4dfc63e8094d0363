"""Triton's module for Python models, as far as octavo's models use it, and a checkpoint small enough to be served."""

import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import octavo
from octavo.export import save_quantized
from octavo.language_model import LanguageModel
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config
from tests.unit.inference.conftest import byte_runner, byte_tokenizer

__all__ = ["byte_runner", "byte_tokenizer"]

SHAPE = tiny_llama_config(vocab_size=256, hidden_size=48, intermediate_size=96, max_positions=320)


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class TritonError:
    INVALID_ARG, UNAVAILABLE, INTERNAL = "invalid", "unavailable", "internal"

    def __init__(self, message, code=INTERNAL):
        self._message, self.code = message, code

    def message(self):
        return self._message


class TritonModelException(Exception):  # noqa: N818 -- Triton's name
    """What Triton's calls raise."""


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self._tensors, self._error = output_tensors, error

    def output_tensors(self):
        return self._tensors

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error


class Sender:
    """Collects responses; ``done`` is set by the last."""

    def __init__(self):
        self.responses, self.done, self.cancelled, self.broken = [], threading.Event(), False, False

    def is_cancelled(self):
        return self.cancelled

    def send(self, response=None, flags=0):
        if self.broken:
            self.done.set()
            raise TritonModelException("the request is gone")
        assert not self.done.is_set(), "a response behind the last"
        if response is not None:
            self.responses.append(response)
        if flags:
            self.done.set()

    def text(self):
        """All pieces together."""
        assert self.done.wait(60)
        return b"".join(piece for response in self.responses for piece in pieces(response)).decode()

    def error(self):
        assert self.done.wait(60)
        return self.responses[-1].error()


class Request:
    """Of named values: texts, whole numbers, numbers, truth values, or arrays."""

    def __init__(self, **values):
        self._tensors = [Tensor(name, array_of(name, value)) for name, value in values.items()]
        self.sender = Sender()

    def inputs(self):
        return self._tensors

    def get_response_sender(self):
        return self.sender


def array_of(name, value):
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str | bytes):
        return np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)
    return np.array(values)


def pieces(response):
    return [piece for tensor in response.output_tensors() for piece in tensor.as_numpy().tolist()]


@pytest.fixture
def utils(monkeypatch):
    """The module that Triton's Python models import."""
    made: Any = ModuleType("triton_python_backend_utils")
    made.Tensor, made.TritonError, made.TritonModelException = Tensor, TritonError, TritonModelException
    made.InferenceResponse, made.TRITONSERVER_RESPONSE_COMPLETE_FINAL = InferenceResponse, 1
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory, byte_tokenizer):
    """A folder as a repository has it for octavo's engine; token 10 ends an answer."""
    model = LanguageModel(
        model=Llama(SHAPE, seed=3), tokenizer=byte_tokenizer, context=SHAPE.max_positions, source="made"
    )
    octavo.convert(model.model, "rowwise")
    folder = tmp_path_factory.mktemp("made") / "model"
    save_quantized(model, folder, dtype="fp32", verify_folder=False)
    (folder / "generation_config.json").write_text('{"eos_token_id": 10}')
    return folder
