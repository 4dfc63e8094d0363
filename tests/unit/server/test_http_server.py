"""A server on a real port: the openai client, many at once, a slow body, and how it ends."""

import asyncio
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from octavo.errors import ConfigError
from octavo.inference import Engine, Load, SamplingParams
from octavo.server import Address, Limits, Server, Service

KEY = "a key"


@pytest.fixture
def start(new_service):
    """Starts servers, and ends them."""
    begun = []

    def begin(**settings):
        service = new_service(**settings)
        listening, ready = Address(port=0).bind(), threading.Event()
        server = Server(service, key=KEY, on_ready=ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        begun.append((server, thread))
        assert ready.wait(60)
        return service, server, listening.getsockname()[1], thread

    yield begin
    for server, thread in begun:
        server.drain()
        thread.join(60)
        assert not thread.is_alive()


def client_of(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


def test_openai_client_works_unmodified(start):
    _, _, port, _ = start()
    with client_of(port) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        talk = [{"role": "user", "content": "Hi"}]
        asked = {"model": "tiny", "messages": talk, "max_tokens": 8, "seed": 1, "logprobs": True, "top_logprobs": 2}
        whole = client.chat.completions.create(**asked).choices[0]
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == whole.message.content
        assert chunks[-1].usage.completion_tokens == 8
        assert len(whole.logprobs.content) == 8
        text = client.completions.create(model="tiny", prompt="Hi", max_tokens=4, temperature=0)
        assert text.usage.total_tokens == 6
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.chat.completions.create(model="other", messages=talk)
        with pytest.raises(openai.BadRequestError, match="max_tokens must be"):
            client.completions.create(model="tiny", prompt="Hi", max_tokens=10**9)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="another", max_retries=0).models.list()


@pytest.mark.long
def test_concurrent_answers_match_answers_alone(start):
    _, _, port, _ = start()
    with client_of(port) as client:

        def ask(seed):
            prompt = f"{seed} is a number" * (seed + 1)
            return client.completions.create(model="tiny", prompt=prompt, seed=seed, max_tokens=20).choices[0].text

        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, range(16)))
        assert together == [ask(seed) for seed in range(16)]


def test_closing_a_stream_cancels_the_answer(start):
    service, _, port, _ = start()
    with client_of(port) as client:
        stream = client.completions.create(model="tiny", prompt="Hi", max_tokens=300, stream=True)
        next(iter(stream))
        stream.close()
        while not service.thread.engine.metrics.finished["cancelled"]:
            time.sleep(0.01)
    assert service.thread.engine.metrics.answer_tokens < 300


def test_slow_body_times_out_while_others_are_answered(start):
    _, _, port, _ = start(limits=Limits(body_s=0.3))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as slow, client_of(port) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n{{"
        )
        slow.sendall(head.encode())
        assert client.completions.create(model="tiny", prompt="Hi", max_tokens=2).usage.completion_tokens == 2
        told = b""
        while piece := slow.recv(4096):
            told += piece
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.3 s" in told


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT is Linux's")
def test_client_that_reads_nothing_is_disconnected(start):
    """More pages are asked for than the buffers of both sides hold, and none is read."""
    _, server, port, _ = start(limits=Limits(send_s=0.3))
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        idle.connect(("127.0.0.1", port))
        idle.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1500)
        deadline = time.monotonic() + 60
        while not server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.server_state.connections
        while server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not server.server_state.connections


def test_first_signal_drains(start):
    _, server, port, thread = start()
    with client_of(port) as client:
        stream = client.completions.create(model="tiny", prompt="Hi", max_tokens=300, seed=1, stream=True)
        first = next(iter(stream))
        server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.InternalServerError, match="accepts no requests"):
            client.completions.create(model="tiny", prompt="Hi")
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        assert first.choices[0].finish_reason is None
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.fixture
def tokenising(monkeypatch):
    """Tokenising that waits to be let go: when it was begun, and what lets it go."""
    encode, begun, go = Service.encode, threading.Event(), threading.Event()

    def slow(self, prompt, **fields):
        begun.set()
        assert go.wait(60)
        return encode(self, prompt, **fields)

    monkeypatch.setattr(Service, "encode", slow)
    yield begun, go
    go.set()


def refused_by(port):
    """How the server refuses a completion, which it is asked for as it begins to drain."""
    with client_of(port) as client, pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt="Hi")
    return caught.value.status_code, caught.value.body


def test_request_being_tokenized_at_drain_gets_503(start, tokenising, capfd):
    begun, go = tokenising
    _, server, port, thread = start()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refused_by, port)
        assert begun.wait(60)
        server.handle_exit(signal.SIGTERM, None)
        for tick in range(3):
            assert not asyncio.run(server.on_tick(tick)), "it is waited for"
        go.set()
        status, error = asked.result(60)
    assert (status, error["code"]) == (503, "draining")
    assert "accepts no requests" in error["message"]
    thread.join(60)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("limits", [Limits(drain_s=0.01), Limits()], ids=["the time is over", "a second signal"])
def test_request_being_tokenized_at_exit_gets_503(start, tokenising, capfd, limits):
    begun, go = tokenising
    _, server, port, thread = start(limits=limits)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refused_by, port)
        assert begun.wait(60)
        server.handle_exit(signal.SIGTERM, None)
        if limits.drain_s > 1:
            server.handle_exit(signal.SIGTERM, None)
        status, error = asked.result(60)
        assert not go.is_set()
    assert (status, error["code"]) == (503, "draining")
    assert error["message"] == "the server ended before it answered; use another server"
    thread.join(60)
    assert "Traceback" not in capfd.readouterr().err


def test_drain_waits_for_a_request_about_to_start(new_service, monkeypatch):
    """It waits when it is looked at first, and runs when it is looked at again."""
    loads = iter([{"waiting": 1, "running": 0}, {"waiting": 0, "running": 1}])
    pages = dict.fromkeys(("pages", "pages_used", "pages_idle"), 0)
    server = Server(new_service())
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "load", property(lambda _: Load(**next(loads), **pages)))
        server.drain()
        assert not asyncio.run(server.on_tick(1))
    assert asyncio.run(server.on_tick(1))


@pytest.mark.parametrize("limits", [Limits(drain_s=0.01), Limits()], ids=["the time is over", "a second signal"])
def test_drain_cancels_answers_after_its_time_limit(start, byte_runner, monkeypatch, limits):
    """The engine stands still, so that no answer ends by itself."""
    service, server, _, thread = start(limits=limits)
    stop = threading.Event()
    read = service.thread.engine._read
    monkeypatch.setattr(service.thread.engine, "_read", lambda chunks: stop.wait(60) or read(chunks))
    service.thread.engine.submit([1], SamplingParams(max_tokens=300), lambda event: None)
    server.handle_exit(signal.SIGTERM, None)
    if limits.drain_s > 1:
        server.handle_exit(signal.SIGTERM, None)
    thread.join(60)
    assert not thread.is_alive()
    service.thread.engine.cancel_all()
    stop.set()


def test_port_in_use_and_unknown_address_are_config_errors():
    with Address(port=0).bind() as taken, pytest.raises(ConfigError, match=r"cannot listen at 127.0.0.1 port"):
        Address(port=taken.getsockname()[1]).bind()
    with pytest.raises(ConfigError, match=r"cannot listen at no.such.host.invalid port 1"):
        Address(host="no.such.host.invalid", port=1).bind()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.1", False),
        ("example.org", False),
    ],
)
def test_other_machines_need_a_key_or_insecure(host, loopback):
    address = Address(host=host)
    assert address.is_loopback is loopback
    address.check_secure(key=KEY, insecure=False)
    address.check_secure(key=None, insecure=True)
    if loopback:
        address.check_secure(key=None, insecure=False)
    else:
        with pytest.raises(ConfigError, match="other machines can send requests to this server; give --api-key-file"):
            address.check_secure(key=None, insecure=False)
