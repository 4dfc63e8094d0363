"""What no request passes: a wrong key, a body too large or too slow, too many at once; and who goes away is noticed."""

import asyncio
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from octavo.server import Limits, create_app
from tests.unit.server.conftest import PLACE

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 2}
KEY = "a key of some length"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer k\xe9y".encode("latin-1")}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
    ],
    ids=repr,
)
def test_key_is_required(service, headers, status):
    with TestClient(create_app(service, key=KEY), base_url=PLACE) as client:
        response = client.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == status
        assert client.get("/metrics", headers=headers).status_code == status
        assert [client.get(path).status_code for path in ("/", "/health", "/v2/health/ready")] == [200] * 3
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert client.get("/v2/models/tiny", headers=headers).json()["error"].startswith("this server needs")


def test_body_size_is_limited_with_and_without_length(new_service):
    with TestClient(create_app(new_service(limits=Limits(body_bytes=100))), base_url=PLACE) as client:
        large = json.dumps(BODY | {"prompt": "x" * 100}).encode()
        for content in (large, iter([large[:60], large[60:]])):
            response = client.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert "100 bytes" in response.json()["error"]["message"]
        assert client.post("/v1/completions", json=BODY).status_code == 200


def scope(path="/v1/completions"):
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
    }


class Peer:
    """Whoever asks, as ASGI sees them: what they send, one message after another, and what they are told."""

    def __init__(self, *messages):
        self.told = []
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        for message in messages:
            self._messages.put_nowait(message)

    async def receive(self):
        return await self._messages.get()

    async def send(self, message):
        self.told.append(message)

    def go_away(self):
        self._messages.put_nowait({"type": "http.disconnect"})

    @property
    def status(self):
        return self.told[0]["status"]


def sent(more=False, **fields):
    return {"type": "http.request", "body": json.dumps(BODY | fields).encode(), "more_body": more}


def test_slow_body_gets_408_while_others_are_answered(new_service):
    app = create_app(new_service(limits=Limits(body_s=0.2)))
    slow, quick = Peer(sent(more=True)), Peer(sent())

    async def ask():
        await asyncio.gather(*(app(scope(), peer.receive, peer.send) for peer in (slow, quick)))

    asyncio.run(ask())
    assert (slow.status, quick.status) == (408, 200)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnection_cancels_the_answer(service, stream):
    app, peer, other = create_app(service), Peer(sent(max_tokens=300, stream=stream)), Peer(sent())

    async def ask():
        task = asyncio.create_task(app(scope(), peer.receive, peer.send))
        while not service.thread.engine.load.running:
            await asyncio.sleep(0)
        peer.go_away()
        await task
        await app(scope(), other.receive, other.send)

    asyncio.run(ask())
    metrics = service.thread.engine.metrics
    assert service.thread.drain(60)
    assert metrics.finished["cancelled"] == 1
    assert metrics.answer_tokens < 300
    assert other.status == 200


def test_disconnection_before_the_body_ends_the_request(service):
    app, peer = create_app(service), Peer(sent(more=True), {"type": "http.disconnect"})
    asyncio.run(app(scope(), peer.receive, peer.send))
    assert peer.told == []
    assert service.thread.engine.metrics.submitted == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stuck", ["http.response.start", "http.response.body"])
def test_stalled_client_is_dropped_while_others_are_answered(new_service, stream, stuck):
    service = new_service(limits=Limits(requests=1, max_tokens=300, send_s=0.05))
    app = create_app(service)

    class Unread(Peer):
        async def send(self, message):
            await super().send(message)
            if message["type"] == stuck:
                await asyncio.Event().wait()

    idle, other = Unread(sent(max_tokens=300, stream=stream)), Peer(sent())

    async def ask():
        await app(scope(), idle.receive, idle.send)
        await app(scope(), other.receive, other.send)

    asyncio.run(ask())
    assert idle.told[-1]["type"] == stuck  # and nothing after it, or a server would take the answer for a whole one
    assert other.status == 200


async def begun(service, app, peer):
    """The task of a request that the engine is answering."""
    task = asyncio.create_task(app(scope(), peer.receive, peer.send))
    while not service.thread.engine.load.running:
        await asyncio.sleep(0)
    return task


def test_too_many_requests_get_429(new_service):
    service = new_service(limits=Limits(requests=1, max_tokens=300))
    app, first, second = create_app(service), Peer(sent(max_tokens=300)), Peer(sent())

    async def ask():
        task = await begun(service, app, first)
        await app(scope(), second.receive, second.send)
        await task

    asyncio.run(ask())
    assert (first.status, second.status) == (200, 429)
    assert (b"retry-after", b"1") in second.told[0]["headers"]


@pytest.mark.parametrize("stream", [True, False])
def test_slot_is_free_when_the_answer_is_complete(new_service, stream):
    app, again = create_app(new_service(limits=Limits(requests=1, max_tokens=300))), Peer(sent())

    class Quick(Peer):
        """Asks again as soon as the end of an answer arrives, when whoever sent it may not have gone on."""

        async def send(self, message):
            await super().send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await app(scope(), again.receive, again.send)

    first, third = Quick(sent(stream=stream)), Peer(sent())

    async def ask():
        await app(scope(), first.receive, first.send)
        await app(scope(), third.receive, third.send)

    asyncio.run(ask())
    assert (first.status, again.status, third.status) == (200, 200, 200)


def test_slot_is_released_once(new_service):
    """Or more than may would be taken when the first is over."""
    service = new_service(limits=Limits(requests=1, max_tokens=300))
    app, first, second, third = create_app(service), Peer(sent()), Peer(sent(max_tokens=300)), Peer(sent())

    async def ask():
        await app(scope(), first.receive, first.send)
        task = await begun(service, app, second)
        await app(scope(), third.receive, third.send)
        await task

    asyncio.run(ask())
    assert (first.status, second.status, third.status) == (200, 200, 429)


def test_full_queue_sends_retry_after(new_service):
    service = new_service(max_running=1, max_waiting=2, limits=Limits(max_tokens=300, choices=2))
    with TestClient(create_app(service), base_url=PLACE) as client:
        response = client.post("/v1/completions", json=BODY | {"n": 3})
        assert response.status_code == 400
    app, peers = create_app(service), [Peer(sent(max_tokens=100)) for _ in range(8)]

    async def ask():
        await asyncio.gather(*(app(scope(), peer.receive, peer.send) for peer in peers))

    asyncio.run(ask())
    statuses = [peer.status for peer in peers]
    assert set(statuses) == {200, 429}
    refused = next(peer for peer in peers if peer.status == 429)
    assert int(dict(refused.told[0]["headers"])[b"retry-after"]) >= 1
    assert json.loads(refused.told[1]["body"])["error"]["type"] == "rate_limit_error"


def test_unknown_paths_and_methods_are_refused(client):
    for path in ("/nowhere", "/v1/models/other", "/v1/completions/"):
        response = client.get(path, follow_redirects=False)
        assert response.status_code in {307, 404}, path
    response = client.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert client.delete("/v2/models/tiny").json() == {"error": "method not allowed"}


def test_closed_engine_is_draining(service):
    with TestClient(create_app(service), base_url=PLACE) as client:
        assert client.get("/health").json() == {"status": "ready"}
        service.thread.engine.close()
        assert (client.get("/health").status_code, client.get("/v2/health/ready").status_code) == (503, 503)
        assert client.get("/health").json() == {"status": "draining"}
        response = client.post("/v1/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failed_engine_is_broken_without_traceback(service, monkeypatch):
    def broken(chunks):
        raise ArithmeticError("the model is gone")

    monkeypatch.setattr(service.thread.engine, "_read", broken)
    with TestClient(create_app(service), base_url=PLACE, raise_server_exceptions=False) as client:
        response = client.post("/v1/completions", json=BODY)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "Traceback" not in response.text
        service.thread.drain(60)
        assert client.get("/health").json() == {"status": "broken"}


def test_internal_error_hides_details(service, monkeypatch):
    def mistaken(*_):
        raise ArithmeticError("a secret")

    monkeypatch.setattr(type(service), "check_model", mistaken)
    with TestClient(create_app(service), base_url=PLACE, raise_server_exceptions=False) as client:
        response = client.post("/v1/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; see the server's log"
