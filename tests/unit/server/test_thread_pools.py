"""Work on prompts: refused by length before it is done, few at once, and its place kept until it is over."""

import asyncio
import re
import threading

import pytest
from starlette.testclient import TestClient

from octavo.server import ChatTemplate, Limits, Service, create_app, thread_pools
from octavo.server.error_responses import ResponseError
from tests.unit.server.conftest import PLACE
from tests.unit.server.test_guard import BODY, Peer, scope, sent

LONG = "x" * 300


@pytest.fixture
def encoding(monkeypatch):
    """Tokenising of long prompts that waits to be let go; what was begun is listed."""
    encode, begun, go = Service.encode, [], threading.Event()

    def slow(self, prompt, **fields):
        begun.append(prompt)
        if len(prompt) >= len(LONG):
            assert go.wait(60)
        return encode(self, prompt, **fields)

    monkeypatch.setattr(Service, "encode", slow)
    yield begun, go
    go.set()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x" * 10_000}),
        ("/v1/completions", {"prompt": ["y", "x" * 10_000]}),
        ("/v1/chat/completions", {"prompt": None, "messages": [{"role": "user", "content": "x" * 10_000}]}),
        ("/v2/models/tiny/generate", {"prompt": None, "model": None, "text_input": "x" * 10_000}),
        ("/tokenize", {"prompt": "x" * 10_000, "max_tokens": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_long_text_is_refused_before_tokenizing(client, encoding, path, fields):
    body = {name: value for name, value in (BODY | fields).items() if value is not None}
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert re.search(r"the prompt has at least \d+ tokens, and at most 320 are accepted; shorten it", response.text)
    assert all(len(prompt) < 10 for prompt in encoding[0])


def test_disconnected_request_counts_until_tokenized(new_service, encoding):
    begun, go = encoding
    app = create_app(new_service(limits=Limits(requests=1)))
    gone, early, late = Peer(sent(prompt=LONG)), Peer(sent()), Peer(sent())

    async def ask():
        task = asyncio.create_task(app(scope(), gone.receive, gone.send))
        while not begun:
            await asyncio.sleep(0)
        gone.go_away()
        for _ in range(50):
            await asyncio.sleep(0)
        await app(scope(), early.receive, early.send)
        go.set()
        await task
        await app(scope(), late.receive, late.send)

    asyncio.run(ask())
    assert (early.status, late.status) == (429, 200)
    assert gone.told == []


def test_short_prompts_do_not_wait_for_long_ones(new_service, encoding, monkeypatch):
    monkeypatch.setattr(thread_pools, "SHORT", 100)
    begun, go = encoding
    app = create_app(new_service())
    long, short = [Peer(sent(prompt=LONG)) for _ in range(4)], Peer(sent())

    async def ask():
        tasks = [asyncio.create_task(app(scope(), peer.receive, peer.send)) for peer in long]
        await app(scope(), short.receive, short.send)
        assert short.status == 200
        assert begun.count(LONG) == 1
        go.set()
        await asyncio.gather(*tasks)

    asyncio.run(ask())
    assert [peer.status for peer in long] == [200] * 4


@pytest.mark.parametrize(("setting", "status"), [(("WAITING", 400), 429), (("WAIT_S", 0.05), 503)])
def test_waiting_text_is_bounded(new_service, encoding, monkeypatch, setting, status):
    monkeypatch.setattr(thread_pools, *setting)
    monkeypatch.setattr(thread_pools, "SHORT", 100)
    _, go = encoding
    app = create_app(new_service())
    first, second = Peer(sent(prompt=LONG)), Peer(sent(prompt=LONG))

    async def ask():
        task = asyncio.create_task(app(scope(), first.receive, first.send))
        await asyncio.sleep(0)
        await app(scope(), second.receive, second.send)
        go.set()
        await task

    asyncio.run(ask())
    assert (first.status, second.status) == (200, status)
    assert (b"retry-after", b"1") in second.told[0]["headers"]


def test_health_reports_stuck_tokenizing(new_service, encoding, monkeypatch):
    begun, go = encoding
    service, asker = new_service(), Peer(sent(prompt=LONG))
    monkeypatch.setattr(thread_pools, "STUCK_S", 0.0)

    async def ask():
        task = asyncio.create_task(create_app(service)(scope(), asker.receive, asker.send))
        while not begun:
            await asyncio.sleep(0)
        assert service.state == "stuck"
        with TestClient(create_app(service), base_url=PLACE) as client:
            assert (client.get("/health").status_code, client.get("/v2/health/ready").status_code) == (503, 503)
        go.set()
        await task

    asyncio.run(ask())
    assert service.state == "ready"


def test_endless_template_fails_only_its_request(new_service):
    source = (
        "{% if messages[0].content == 'x' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    service = new_service(template=ChatTemplate(source, seconds=0.2))
    with TestClient(create_app(service), base_url=PLACE) as client:
        for content, status in (("x", 500), ("y", 200), ("x", 500), ("y", 200)):
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == status
            assert "did not end within 0.2 s and was stopped" in response.text or status == 200
        assert client.get("/health").json() == {"status": "ready"}


def test_errors_are_raised_to_the_request():
    def fail():
        raise ResponseError(400, "no")

    with pytest.raises(ResponseError, match="no"):
        asyncio.run(thread_pools.BoundedThreadPool("work", 1).run(fail, size=1))
