"""The repository's client as it is copied: a file alone, run by a Python without octavo, against octavo's server."""

import json
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files

import pytest

from octavo.inference import EngineConfig, load_served_model
from octavo.server import Address, Limits, Server, Service


@pytest.fixture(scope="module")
def place(checkpoint):
    server = Server(Service.of(load_served_model(checkpoint), "octavo", config=EngineConfig(), limits=Limits()))
    listening = Address(port=0).bind()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.drain()
    thread.join()


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("repository") / "client.py"
    path.write_bytes(files("octavo.server.triton").joinpath("client.py").read_bytes())
    return path


def _told(script, *arguments):
    """-I -S: no site-packages, so that nothing but the standard library can be imported."""
    command = [sys.executable, "-I", "-S", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("options", [[], ["--whole", "--model", "octavo"], ["--temperature", "0.9", "--seed", "3"]])
def test_client_prints_the_answer(place, script, options):
    fields = {"text_input": "one", "max_tokens": 20, "temperature": 0.9 if "--seed" in options else 0.0}
    fields |= {"seed": 3} if "--seed" in options else {}
    request = urllib.request.Request(f"{place}/v2/models/octavo/generate", json.dumps(fields).encode())
    with urllib.request.urlopen(request) as response:
        wanted = json.load(response)["text_output"]
    told = _told(script, "one", "--url", place, "--max-tokens", "20", *options)
    assert (told.returncode, told.stdout, told.stderr) == (0, wanted + "\n", "")
    assert wanted


def test_server_errors_are_printed(place, script):
    told = _told(script, "one", "--url", place, "--max-tokens", "0")
    assert told.returncode == 1
    assert told.stderr.startswith("max_tokens must be a whole number")
    assert told.stdout == ""
    assert "other" in _told(script, "one", "--url", place, "--model", "other").stderr


def test_missing_server_is_one_sentence(script):
    told = _told(script, "one", "--url", "http://127.0.0.1:9")
    assert told.returncode == 1
    assert told.stderr.startswith("no server answers at http://127.0.0.1:9 (")
    assert "--url" in told.stderr


def test_wrong_url_is_one_sentence(script):
    told = _told(script, "one", "--url", "localhost")
    assert (told.returncode, told.stdout) == (1, "")
    assert "localhost/v2/models/octavo/generate_stream is not an endpoint of such a server" in told.stderr


def test_an_error_within_a_stream_ends_the_answer(script):
    class Failing(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"text_output": "On"}\n\ndata: {"error": "the cache is full"}\n\n')

        def log_message(self, *_):
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Failing)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    told = _told(script, "one", "--url", f"http://127.0.0.1:{server.server_port}")
    thread.join()
    server.server_close()
    assert (told.returncode, told.stdout, told.stderr) == (1, "On", "the cache is full\n")
