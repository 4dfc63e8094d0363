"""KServe's protocol v2 beside the completions of the same server, and Triton's own client."""

import json
import struct
import threading

import numpy as np
import pytest

from octavo.server import Address, Server

MODEL = "/v2/models/tiny"


def completion(client, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, **fields}
    return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def tensor(name, datatype, *values):
    return {"name": name, "datatype": datatype, "shape": [len(values)], "data": list(values)}


def test_the_model_names_its_tensors(client):
    for path in (MODEL, f"{MODEL}/versions/1"):
        found = client.get(path).json()
        assert (found["name"], found["versions"]) == ("tiny", ["1"])
        types = {own["name"]: own["datatype"] for own in found["inputs"]}
        assert (types["text_input"], types["max_tokens"], types["temperature"]) == ("BYTES", "INT32", "FP32")
        assert found["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}]
    assert client.get(f"{MODEL}/ready").status_code == 200
    assert client.get("/v2/models/other/ready").status_code == 404
    assert client.get(f"{MODEL}/versions/2").json() == {"error": "'tiny' has only version 1"}
    assert "binary_tensor_data" in client.get("/v2").json()["extensions"]


def test_generate_and_stream_match_completion(client):
    body = {"text_input": "one", "max_tokens": 8, "seed": 3, "temperature": 1.5}
    wanted = completion(client, "one", seed=3, temperature=1.5)
    assert client.post(f"{MODEL}/generate", json=body).json() == {
        "model_name": "tiny",
        "model_version": "1",
        "text_output": wanted,
    }
    blocks = client.post(f"{MODEL}/generate_stream", json=body).text.split("\n\n")[:-1]
    assert "".join(json.loads(block.removeprefix("data: "))["text_output"] for block in blocks) == wanted


def test_infer_with_json_tensors(client):
    inputs = [
        tensor("text_input", "BYTES", "one", "two"),
        tensor("max_tokens", "INT32", 8),
        tensor("seed", "INT64", 3, 4),
    ]
    found = client.post(f"{MODEL}/infer", json={"id": "7", "inputs": inputs}).json()
    (output,) = found["outputs"]
    wanted = [completion(client, "one", seed=3), completion(client, "two", seed=4)]
    assert output == {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": wanted}
    assert found["id"] == "7"


def test_infer_with_binary_tensors(client):
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (b"one", b"two"))
    numbers = np.array([8], "<i4").tobytes()
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "parameters": {"binary_data_size": len(texts)}},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": len(numbers)}},
        tensor("temperature", "FP32", 0.0),
    ]
    outputs = [{"name": "text_output", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    response = client.post(f"{MODEL}/infer", content=head + texts + numbers, headers=headers)
    length = int(response.headers["Inference-Header-Content-Length"])
    wanted = [completion(client, text, temperature=0).encode() for text in ("one", "two")]
    assert response.content[length:] == b"".join(struct.pack("<I", len(text)) + text for text in wanted)
    size = json.loads(response.content[:length])["outputs"][0]["parameters"]["binary_data_size"]
    assert size == len(response.content) - length


TEXT = tensor("text_input", "BYTES", "x")
BINARY = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}


@pytest.mark.parametrize(
    ("body", "behind", "says"),
    [
        ({"inputs": []}, b"", "inputs must have from 1"),
        ({"inputs": [tensor("max_tokens", "INT32", 4)]}, b"", "text_input is missing"),
        ({"inputs": [tensor("text_input", "INT32", 4)]}, b"", "must be a tensor of BYTES, not INT32"),
        ({"inputs": [TEXT, tensor("max_tokens", "INT32", 0)]}, b"", "max_tokens must be a whole number from 1"),
        ({"inputs": [TEXT, tensor("max_tokens", "INT32", 1, 2)]}, b"", "has 2 values for 1 texts"),
        ({"inputs": [TEXT, tensor("max_tokens", "INT32")]}, b"", "has 0 values"),
        ({"inputs": [TEXT, tensor("other", "INT32", 1)]}, b"", "other is not a known field"),
        ({"inputs": [{**TEXT, "shape": [3]}]}, b"", "of shape [3] with 1 values"),
        ({"inputs": [{**TEXT, "datatype": "FP8"}]}, b"", "must be one of 'BYTES'"),
        ({"inputs": [TEXT], "outputs": [{"name": "logits"}]}, b"", "there is no output 'logits'"),
        ({"inputs": [TEXT]}, b"more", "4 bytes follow the last tensor"),
        ({"inputs": [BINARY]}, b"\x01\x00", "of 9 bytes, of which 2 arrived"),
        ({"inputs": [BINARY]}, b"\xff" * 9, "whose bytes are not BYTES"),
        ({"inputs": [BINARY]}, b"\x05\x00\x00\x00\xff\xff\xff\xff\xff", "whose bytes are not BYTES"),
        ({"inputs": [{**BINARY, "datatype": "INT32", "name": "seed"}]}, b"\x01" * 9, "whose bytes are not INT32"),
        ({"inputs": [{**TEXT, "data": None}]}, b"", "both or none"),
        ({"inputs": [TEXT, TEXT]}, b"", "has two tensors called 'text_input'; send one"),
        ({"inputs": [{**TEXT, "data": [0] * 70_000}]}, b"", "inputs[0].data may have at most 65536 values"),
        ({"inputs": [{**TEXT, "data": [0] * 70_000 + [[[[[[[[[1]]]]]]]]]}]}, b"", "data may have at most 65536 values"),
        (
            {"inputs": [{**TEXT, "data": [[[[[[[[["x"]]]]]]]]]}]},
            b"",
            "inputs[0].data may have at most 8 levels of lists",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_invalid_tensors_get_kserve_errors(client, body, behind, says):
    head = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    response = client.post(f"{MODEL}/infer", content=head + behind, headers=headers)
    assert response.status_code == 400
    assert says in response.json()["error"]


@pytest.mark.parametrize("length", ["-1", "x", "99999999999999999999", "٣", ""])
def test_invalid_header_length_is_refused(client, length):
    headers = {"Inference-Header-Content-Length": length.encode()}
    response = client.post(f"{MODEL}/infer", json={"inputs": [TEXT]}, headers=headers)
    assert response.status_code == 400
    assert "Inference-Header-Content-Length" in response.json()["error"]


def test_tritonclient_works_unmodified(service, client):
    """As it comes, which sends and asks for bytes."""
    http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    listening = Address(port=0).bind()
    server = Server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        thread.join(0.01)
    theirs = http.InferenceServerClient(f"127.0.0.1:{listening.getsockname()[1]}")
    assert theirs.is_server_live()
    assert theirs.is_server_ready()
    assert theirs.is_model_ready("tiny")
    assert theirs.get_model_metadata("tiny")["name"] == "tiny"
    values = {
        "text_input": np.array([b"one"], np.object_),
        "max_tokens": np.array([8], np.int32),
        "seed": np.array([3], np.int64),
    }
    inputs = []
    for name, array in values.items():
        datatype = {"O": "BYTES", "i": f"INT{8 * array.itemsize}"}[array.dtype.kind]
        inputs.append(http.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    wanted = completion(client, "one", seed=3)
    for outputs in (None, [http.InferRequestedOutput("text_output")]):
        found = theirs.infer("tiny", inputs, outputs=outputs).as_numpy("text_output")
        assert [text.decode() for text in found] == [wanted]
    with pytest.raises(Exception, match="the model 'other' is not served here"):
        theirs.infer("other", inputs)
    theirs.close()
    server.drain()
    thread.join()
