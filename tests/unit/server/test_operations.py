"""What every body passes before its fields are looked at."""

import gzip
import json

import pytest

COMPLETION = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
INFERENCE = json.dumps({"inputs": [TENSOR]}).encode()
BODIES = [("/v1/completions", COMPLETION), ("/v2/models/tiny/infer", INFERENCE)]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_compressed_body_gets_415(client, path, body):
    response = client.post(path, content=gzip.compress(body), headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415
    assert "the content coding 'gzip' is not supported; send the body uncompressed" in response.text


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_identity_encoding_is_read(client, path, body):
    assert client.post(path, content=body, headers={"Content-Encoding": "Identity"}).status_code == 200
