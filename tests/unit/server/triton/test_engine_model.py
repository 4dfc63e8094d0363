"""Octavo's engine as a model of Triton's, beside octavo's own server on the same checkpoint."""

import json
import shutil

import numpy as np
import pytest
from starlette.testclient import TestClient

from octavo.inference import EngineConfig, load_served_model
from octavo.server import Limits, Service, create_app
from octavo.server.triton.config_text import EnumValue
from octavo.server.triton.configs import engine_config
from octavo.server.triton.engine_model import FOLDER, TritonPythonModel
from tests.unit.server.triton.conftest import Request


def started(checkpoint, folder, **settings):
    """As Triton does."""
    shutil.copytree(checkpoint, folder / "octavo" / "1" / FOLDER)
    written = {own["key"]: own["value"] for own in engine_config("octavo")["parameters"]}
    written |= {name: {"string_value": str(value)} for name, value in settings.items()}
    made = TritonPythonModel()
    made.initialize(
        {
            "model_name": "octavo",
            "model_version": "1",
            "model_repository": str(folder / "octavo"),
            "model_config": json.dumps({"parameters": written}),
        }
    )
    return made


@pytest.fixture
def model(utils, checkpoint, tmp_path):
    made = started(checkpoint, tmp_path)
    yield made
    made.finalize()
    assert made._service.thread.engine.load.pages_used == 0


@pytest.fixture(scope="module")
def client(checkpoint):
    """Of octavo's own server."""
    service = Service.of(load_served_model(checkpoint), "octavo", config=EngineConfig(), limits=Limits())
    with TestClient(create_app(service), base_url="http://127.0.0.1") as made:
        yield made
    assert service.thread.drain(60)


ASKED = [
    {"text_input": "one", "max_tokens": 12, "temperature": 0.0, "ignore_eos": True},
    {"text_input": "two", "max_tokens": 40, "temperature": 0.0},
    {"text_input": "one", "seed": 7, "temperature": 1.5, "top_k": 40, "min_p": 0.01, "top_p": 0.9},
    {"text_input": "one", "max_tokens": 60, "seed": 7, "stop": ["e", "a", "o"]},
]


def test_concurrent_requests_match_octavo_server(model, client):
    requests = [Request(**asked) for asked in ASKED]
    assert model.execute(requests) is None
    for request, asked in zip(requests, ASKED, strict=True):
        wanted = client.post("/v2/models/octavo/generate", json=asked).json()["text_output"]
        assert request.sender.text() == wanted
    assert len(requests[0].sender.responses) > 1, "an answer comes in pieces"


@pytest.mark.parametrize(
    "asked",
    [
        {"text_input": "x", "max_tokens": 0},
        {"text_input": "x" * 400},
        {"text_input": "", "max_tokens": 4},
        {"text_input": "x", "temperature": -1.0},
        {"max_tokens": 4},
    ],
    ids=lambda asked: next(iter(asked.items())).__repr__()[:30],
)
def test_errors_match_octavo_server(model, client, asked):
    request = Request(**asked)
    model.execute([request])
    response = client.post("/v2/models/octavo/generate", json=asked)
    assert response.status_code == 400
    assert request.sender.error().message() == response.json()["error"]
    assert request.sender.error().code == "invalid"


def test_invalid_utf8_and_several_texts_are_refused(model):
    bad, several, good = (
        Request(text_input=np.array([b"\xff"], np.object_)),
        Request(text_input=["one", "two"]),
        Request(text_input="x", max_tokens=3),
    )
    model.execute([bad, several, good])
    assert "not UTF-8" in bad.sender.error().message()
    assert "must have from 1 to 1 texts, not 2" in several.sender.error().message()
    good.sender.text()


def test_cancelled_and_dropped_requests_end(model):
    cancelled, gone = (Request(text_input="x", max_tokens=300, ignore_eos=True) for _ in range(2))
    cancelled.sender.cancelled = gone.sender.broken = True
    model.execute([cancelled, gone])
    assert "cancelled this answer" in cancelled.sender.error().message()
    assert gone.sender.done.wait(60)


def test_request_dropped_before_submission_returns_ends_alone(model, monkeypatch):
    engine, own = model._service.thread.engine, model._service.thread.engine.submit

    def slow(*given):
        request = own(*given)
        assert gone.sender.done.wait(60)
        return request

    gone, other = (Request(text_input="x", max_tokens=300, ignore_eos=True) for _ in range(2))
    gone.sender.broken = True
    monkeypatch.setattr(engine, "submit", slow)
    model.execute([gone])
    monkeypatch.undo()
    model.execute([other])
    assert gone.sender.done.wait(60)
    other.sender.text()
    assert model._service.thread.failure is None


def test_a_full_queue_is_unavailable(utils, checkpoint, tmp_path):
    model = started(checkpoint, tmp_path, max_running=1, max_waiting=1)
    requests = [Request(text_input="x", max_tokens=200, ignore_eos=True) for _ in range(8)]
    model.execute(requests)
    for request in requests:
        assert request.sender.done.wait(60)
    refused = [r.sender.responses[-1].error() for r in requests if r.sender.responses[-1].has_error()]
    assert refused
    assert {(error.code, error.message().split(",")[0]) for error in refused} == {
        ("unavailable", "the queue is full with 1 requests; try again in 1 s")
    }
    model.finalize()


def test_string_parameters_become_engine_config():
    assert all(isinstance(own["data_type"], EnumValue) for own in engine_config("octavo")["input"])
