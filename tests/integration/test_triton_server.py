"""Triton's own server on an exported repository, beside octavo's on the same checkpoint, asked by the same clients."""

import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from octavo.inference import EngineConfig, load_served_model
from octavo.server import Address, Limits, Server, Service
from octavo.server.triton.running import Ports, TritonServer
from tests.triton_environment import ask, triton_environment
from tests.unit.server.triton.conftest import byte_tokenizer
from tests.unit.server.triton.repositories import written_repository

__all__ = ["byte_tokenizer"]

WHOLE, STREAMING = "octavo_whole", "octavo"
REQUESTS = [
    {"text_input": ["one"], "max_tokens": [24], "temperature": [0.0], "ignore_eos": [True]},
    {"text_input": ["two", "three"], "max_tokens": [30], "temperature": [0.0, 0.0]},
    {"text_input": ["four"], "max_tokens": [20], "seed": [7], "temperature": [1.5], "top_k": [50], "top_p": [0.9]},
    {"text_input": ["five"], "max_tokens": [60], "seed": [8], "stop": ["e", "a"], "min_p": [0.01]},
    {"text_input": ["six"], "max_tokens": [0]},
]
TEXTS = REQUESTS[:1] + REQUESTS[2:4]


@pytest.fixture(scope="module")
def environment():
    return triton_environment()


@pytest.fixture(scope="module")
def repository(environment, byte_tokenizer, tmp_path_factory):
    return written_repository(tmp_path_factory.mktemp("triton") / "repository", byte_tokenizer).folder


@pytest.fixture(scope="module")
def triton(environment, repository, tmp_path_factory):
    """Where Triton listens."""
    listening = [Address(port=0).bind() for _ in range(3)]
    ports = Ports(**dict(zip(("http", "grpc", "metrics"), (own.getsockname()[1] for own in listening), strict=True)))
    for own in listening:
        own.close()
    log = tmp_path_factory.mktemp("log") / "log"
    with TritonServer.started(repository, environment, ports=ports, log=log, ready_seconds=300):
        yield ports


@pytest.fixture(scope="module")
def own(repository):
    """Where octavo's own server listens, with the same checkpoint."""
    served = load_served_model(repository / "models" / "octavo" / "1" / "model")
    server = Server(Service.of(served, WHOLE, config=EngineConfig(), limits=Limits()))
    listening = Address(port=0).bind()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    server.drain()
    thread.join()


def test_the_same_client_gets_the_same_text_from_both(environment, triton, own):
    asked = {"model": WHOLE, "requests": REQUESTS}
    theirs = ask(
        environment,
        http={"place": f"127.0.0.1:{triton.http}", **asked},
        grpc={"place": f"127.0.0.1:{triton.grpc}", **asked},
        stream={"place": f"127.0.0.1:{triton.grpc}", "model": STREAMING, "requests": TEXTS},
    )
    ours = ask(environment, http={"place": own, **asked})["http"]
    assert all(ours[:4])
    assert "max_tokens must be a whole number" in ours[4]["error"]
    assert theirs["grpc"] == ours
    assert theirs["http"][:4] == ours[:4]
    assert ours[4]["error"] in theirs["http"][4]["error"]
    assert [["".join(pieces)] for pieces in theirs["stream"]] == [ours[0], ours[2], ours[3]]
    assert len(theirs["stream"][0]) > 1, "an answer comes in pieces"


def test_generate_and_its_stream_over_http(triton, own):
    body = {"text_input": "one", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    wanted = json.loads(fetched(f"http://{own}/v2/models/{WHOLE}/generate", body))["text_output"]
    found = fetched(f"http://127.0.0.1:{triton.http}/v2/models/{WHOLE}/generate", body)
    assert json.loads(found)["text_output"] == wanted
    lines = fetched(f"http://127.0.0.1:{triton.http}/v2/models/{STREAMING}/generate_stream", body).splitlines()
    pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line]
    assert "".join(pieces) == wanted


def test_the_repositorys_client_prints_what_the_server_says(repository, triton, own):
    body = {"text_input": "one", "max_tokens": 24, "temperature": 0}
    wanted = json.loads(fetched(f"http://{own}/v2/models/{WHOLE}/generate", body))["text_output"]
    for options in ([], ["--whole"]):
        command = [sys.executable, repository / "client.py", "one", "--max-tokens", "24", *options]
        told = subprocess.run(
            [*command, "--url", f"http://127.0.0.1:{triton.http}"], capture_output=True, text=True, check=True
        )
        assert told.stdout == wanted + "\n"


def test_abandoned_stream_leaves_the_server_answering_others(environment, triton):
    request = {"text_input": ["x"], "max_tokens": [300], "ignore_eos": [True]}
    place = {"place": f"127.0.0.1:{triton.grpc}", "model": STREAMING}
    assert ask(environment, abandon={**place, "request": request})["abandon"]
    assert len(ask(environment, stream={**place, "requests": TEXTS})["stream"]) == len(TEXTS)


def test_the_graph_s_batches_are_its_rows(environment, triton):
    rows = [[[1, 2, 3]], [[4, 5, 6], [7, 8, 9]], [[1, 2, 3, 4]]]
    found = ask(environment, logits={"place": f"127.0.0.1:{triton.http}", "requests": rows})["logits"]
    assert [shape for shape, _ in found] == [[1, 3, 256], [2, 3, 256], [1, 4, 256]]
    assert found[0][1][0] == found[2][1][0][:3]


def test_every_configuration_is_one_of_triton_s(environment, repository):
    paths = [str(path) for path in repository.rglob("config.pbtxt")]
    found = {
        Path(path).parent.name: own for path, own in ask(environment, configurations=paths)["configurations"].items()
    }
    assert found.keys() == {"octavo", "octavo_whole", "onnx", "tensorrt", "vllm", "tensorrt_llm"}
    assert {name: own["name"] for name, own in found.items()} == {name: name for name in found}
    assert all(own["version_policy"] == {"latest": {"num_versions": 1}} for own in found.values())
    decoupled = {name for name, own in found.items() if own.get("model_transaction_policy", {}).get("decoupled")}
    assert decoupled == {"octavo", "vllm", "tensorrt_llm"}
    assert {name for name, own in found.items() if "dynamic_batching" in own} == {"onnx", "tensorrt", "tensorrt_llm"}
    engine = found["tensorrt"]
    assert (engine["platform"], engine["default_model_filename"]) == ("tensorrt_plan", "model.engine")
    assert engine["input"] == [{"name": "input_ids", "data_type": "TYPE_INT64", "dims": ["-1"]}]
    assert engine["output"] == [{"name": "logits", "data_type": "TYPE_FP32", "dims": ["-1", "256"]}]


def fetched(place, body):
    request = urllib.request.Request(place, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()
