"""A real server among clients that are slow, leave, send too much or nothing: afterwards it is as it was before.

Each round one client of a kind drawn from a seed misbehaves, while earlier ones still do. The server may open few
files.
By hand for longer: ``OCTAVO_SLOW_CLIENTS=5000 pytest tests/integration/test_slow_clients.py``.
"""

import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from contextlib import suppress
from pathlib import Path

import pytest

from octavo.models import Llama
from octavo.models.llama_folder import write_llama, write_tokenizer
from octavo.text.tokenizer import train_tokenizer
from tests.policy.source_tree import SOURCE
from tests.tiny_llama import tiny_llama_config

pytestmark = pytest.mark.long

ROUNDS = int(os.environ.get("OCTAVO_SLOW_CLIENTS", "250"))
FILES = 96
OPEN = 150  # connections of ours at once
MORE_BYTES = 2**28
HEAD = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
TEMPLATE = (
    "{% if messages[0].content == 'forever' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ messages[0].content }}"
)


@pytest.fixture
def folder(tmp_path):
    config = tiny_llama_config(num_layers=1, num_heads=2, num_kv_heads=1, max_positions=4096, tie_embeddings=True)
    write_llama(tmp_path, Llama(config, seed=1))
    write_tokenizer(tmp_path, train_tokenizer(["some text, some more text"] * 3, vocab_size=300), context=4096)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def server(folder, tmp_path_factory):
    """The process of a server that may open few files, its port, and its log."""
    command = [sys.executable, "-m", "octavo", "serve", str(folder), "--name", "tiny", "--port", "0"]
    command += ["--head-seconds", "1", "--body-seconds", "1", "--send-seconds", "1", "--drain-seconds", "2"]
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("wb") as stderr:
        limited = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", *command]
        process = subprocess.Popen(limited, stderr=stderr, env=os.environ | {"PYTHONPATH": str(SOURCE)})
    try:
        while (place := re.search(r"is served at http://127.0.0.1:(\d+);", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process, int(place[1]), log
    finally:
        process.kill()
        process.wait()


class Clients:
    """Connections that misbehave; the oldest are closed where there are too many."""

    def __init__(self, port):
        self._port = port
        self._opened: deque[socket.socket] = deque()

    def connect(self, data=b"", *, buffer=None):
        if len(self._opened) >= OPEN:
            self._opened.popleft().close()
        own = socket.socket()
        if buffer is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        own.settimeout(30)
        self._opened.append(own)
        with suppress(OSError):  # it was closed while it was written to, which is the server's right
            own.connect(("127.0.0.1", self._port))
            own.sendall(data)
        return own

    def close(self):
        while self._opened:
            self._opened.popleft().close()


def post(path, body, *, length=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(data) if length is None else length
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (path.encode(), HEAD, size, data)


def completion(**fields):
    return post("/v1/completions", {"model": "tiny", "prompt": "some text", "max_tokens": 4} | fields)


def chat(content):
    messages = [{"role": "user", "content": content}]
    return post("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 4})


def idle(clients, chance):
    clients.connect()


def slow_head(clients, chance):
    whole = completion()
    clients.connect(whole[: chance.randrange(1, whole.index(b"\r\n\r\n"))])


def slow_body(clients, chance):
    clients.connect(post("/v1/completions", b'{"model": ', length=chance.randrange(100, 10**6)))


def slow_reader(clients, chance):
    clients.connect(completion(max_tokens=chance.randrange(100, 3000), stream=True), buffer=1024)


def reader_of_nothing(clients, chance):
    clients.connect((b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n") * 200, buffer=1024)


def half_closed(clients, chance):
    own = clients.connect(completion(max_tokens=500))
    with suppress(OSError):  # it was closed already
        own.shutdown(socket.SHUT_WR)


def hang_up(clients, chance):
    clients.connect(completion(prompt="some text " * chance.randrange(1, 4000))).close()


def large_body(clients, chance):
    clients.connect(completion(prompt="x" * 900_000))


def too_large_a_body(clients, chance):
    clients.connect(post("/v1/completions", b"x" * 10_000, length=10**9))


def many_tokens(clients, chance):
    clients.connect(completion(prompt=[1] * chance.randrange(1, 20_000)))


def garbage(clients, chance):
    clients.connect(chance.randbytes(chance.randrange(1, 5000)))


def endless_head(clients, chance):
    clients.connect(b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 100_000)


KINDS = (
    *(idle, slow_head, slow_body, slow_reader, reader_of_nothing, half_closed, hang_up, large_body),
    *(too_large_a_body, many_tokens, garbage, endless_head),
)


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return response.read().decode()


def answered(port, path):
    """What is at a path, as soon as the server has dealt with what came before."""
    end = time.monotonic() + 60
    while True:
        try:
            return get(port, path)
        except (OSError, urllib.error.URLError):
            assert time.monotonic() < end, f"{path} was not answered"
            time.sleep(0.2)


def ask(port):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", completion().split(b"\r\n\r\n")[1])
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["usage"]["completion_tokens"]


def resident(pid):
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def value(metrics, name):
    return next(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(f"{name} "))


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT and /proc are Linux's")
def test_a_server_outlives_its_clients(server):
    process, port, log = server
    chance, clients, before = random.Random(24), Clients(port), resident(process.pid)
    assert ask(port) == 4
    for i in range(ROUNDS):
        chance.choice(KINDS)(clients, chance)
        if i % 100 == 50:
            clients.connect(chat("forever"))
        if i % 50 == 49:  # in the midst of it
            answered(port, "/health")
    clients.close()
    answered(port, "/health")
    end = time.monotonic() + 60
    while value(metrics := get(port, "/metrics"), "octavo_requests_running"):
        assert time.monotonic() < end, metrics
        time.sleep(0.1)
    assert value(metrics, 'octavo_cache_pages{state="used"}') == 0
    assert ask(port) == 4
    assert resident(process.pid) < before + MORE_BYTES
    said = log.read_text().partition("is served at")[2]
    assert len(said.splitlines()) < 20, said[-2000:]
    for _ in range(7):
        clients.connect(chat("forever"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    clients.close()
