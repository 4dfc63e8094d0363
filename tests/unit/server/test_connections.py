"""Connections: slow heads and idle clients are ended, many of them keep nobody out, and the log stays short."""

import asyncio
import json
import logging
import os
import resource
import socket
import threading

import pytest

from octavo.errors import ConfigError
from octavo.server import Address, Limits, Server, answer_not_ready
from octavo.server.connections import ACCEPT, RESERVED, capacity_for, limit_log

HEAD = b"Host: 127.0.0.1\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HEAD


@pytest.fixture
def start(new_service):
    """Starts a server and gives its port; it ends with the test."""
    begun = []

    def begin(**limits):
        service, listening, ready = new_service(limits=Limits(**limits)), Address(port=0).bind(), threading.Event()
        server = Server(service, on_ready=ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        begun.append((server, thread))
        assert ready.wait(60)
        return listening.getsockname()[1]

    yield begin
    for server, thread in begun:
        server.drain()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def connect():
    """Opens connections, all of which are closed in the end."""
    opened = []

    def begin(port, data=b""):
        opened.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        opened[-1].sendall(data)
        return opened[-1]

    yield begin
    for own in opened:
        own.close()


def rest(connection):
    """What comes until the server closes."""
    told = b""
    while piece := connection.recv(65536):
        told += piece
    return told


def test_slow_head_gets_408(start, connect):
    port = start(head_s=0.2)
    idle, slow = connect(port), connect(port, HEALTH)
    assert rest(idle) == b""
    head, _, body = rest(slow).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    sentence = "the request's head did not arrive within 0.2 s; send it faster"
    assert json.loads(body)["error"]["message"] == sentence


def test_time_limit_holds_for_second_head_and_unwanted_body(start, connect):
    port = start(head_s=0.2)
    for first, second in ((HEALTH + b"\r\n", HEALTH), (HEALTH + b"Content-Length: 999\r\n\r\n", b"x")):
        connection = connect(port, first)
        told = connection.recv(65536)
        assert told.startswith(b"HTTP/1.1 200 ")
        connection.sendall(second)
        assert (b"408" in rest(connection)) is (second == HEALTH)


def test_idle_connections_are_closed_for_new_ones(start, connect):
    port = start(connections=20)
    first, *others = [connect(port, HEALTH[: i % 9]) for i in range(60)]
    for _ in range(3):
        assert rest(connect(port, HEALTH + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert first.recv(1) == b""
    others[-1].sendall(HEALTH[(59 % 9) :] + b"Connection: close\r\n\r\n")
    assert rest(others[-1]).startswith(b"HTTP/1.1 200 ")


def test_connection_beyond_busy_limit_gets_503(start, connect):
    port = start(connections=1)
    asking = connect(
        port, b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    )
    assert asking.recv(12) == b"HTTP/1.1 100"
    told = rest(connect(port))
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"the server is answering its maximum of 1 connections; try again" in told
    assert b"Retry-After: 1" in told


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "raised"),
    [(10**6, 10**6, 1024, None), (256, 4096, 1024, True), (256, 256, 1024, None), (96, 96, 1024, None)],
)
def test_connections_are_limited_by_file_descriptors(monkeypatch, soft, hard, wanted, raised):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 20)
    room = capacity_for(Limits(connections=wanted))
    limit = given[0][0] if given else soft
    assert bool(given) is bool(raised)
    assert 20 + 16 + room.connections + 4 * room.batch <= limit <= hard
    assert room.requests <= room.connections - RESERVED
    assert room.connections == wanted or hard < wanted


def test_too_few_file_descriptors_are_a_config_error(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 20)
    with pytest.raises(ConfigError, match=r"may open 40 files and 20 are open, too few to serve; raise ulimit -n"):
        capacity_for(Limits())


def test_accept_errors_are_logged_once(caplog):
    loop = asyncio.new_event_loop()
    limit_log(loop)
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            loop.call_exception_handler({"message": ACCEPT, "exception": OSError(24, "Too many open files")})
        loop.call_exception_handler({"message": "something else"})
    loop.close()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["no connection can be accepted: [Errno 24] Too many open files", "something else"]


def test_loading_server_is_live_but_not_ready(connect):
    with Address(port=0).bind() as listening:
        port = listening.getsockname()[1]
        with answer_not_ready(listening, limits=Limits()):
            for path, status in (("/v2/health/live", 200), ("/health", 503), ("/v2/health/ready", 503), ("/", 503)):
                told = rest(connect(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))
                assert told.startswith(f"HTTP/1.1 {status} ".encode())
            assert b'{"status":"loading"}' in rest(connect(port, HEALTH + b"\r\n"))
            asked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
            assert b"the model is still being loaded; try again" in rest(connect(port, asked))
        waiting = connect(port, HEALTH + b"\r\n")  # for who serves next
        waiting.settimeout(0.1)
        with pytest.raises(TimeoutError):
            waiting.recv(1)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HEAD + b"no colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 70_000,
    ],
    ids=["a line", "a header", "a chunk", "a long line"],
)
def test_invalid_http_gets_an_error_object(start, connect, data):
    head, _, body = rest(connect(start(), data)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert "no HTTP/1.1 request" in error["message"]
