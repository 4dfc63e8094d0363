"""A server without a key is used by programs and by its own page; no page of others makes it work or reads it."""

import pytest
from starlette.testclient import TestClient

from octavo.server import create_app
from octavo.server.origins import is_loopback
from tests.unit.server.conftest import PLACE

BODY = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'
PATHS = ("/", "/health", "/metrics", "/v1/models", "/v2/health/ready", "/openapi.json", "/nowhere")


def statuses(app, headers):
    with TestClient(app, base_url=PLACE) as client:
        simple = {"Content-Type": "text/plain", **headers}  # what a page may send without asking first
        asked = client.post("/v1/completions", content=BODY, headers=simple)
        return {asked.status_code, *(client.get(path, headers=headers).status_code for path in PATHS)}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost:8000"},
        {"Host": "LocalHost"},
        {"Host": "127.9.9.9:1"},
        {"Host": "[::1]:8000", "Origin": "http://[::1]:8000"},
        {"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"},
        {"Host": "localhost", "Origin": "https://localhost"},
    ],
    ids=str,
)
def test_programs_and_own_page_are_accepted(service, headers):
    assert statuses(create_app(service), headers) == {200, 404}


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"Origin": "http://evil.example"}, "it accepts no requests from other sites' web pages, such as 'http://evil"),
        ({"Origin": "null"}, "such as 'null'"),
        ({"Origin": ""}, "such as ''"),
        ({"Origin": "http://127.0.0.1:3000"}, "127.0.0.1:3000"),
        ({"Origin": "http://127.0.0.1.evil.example"}, "127.0.0.1.evil.example"),
        ({"Origin": "http://localhost"}, "http://localhost"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "not 'evil.example'"),
        ({"Host": "evil.example:8000"}, "it accepts only the hosts localhost, 127.0.0.1 and [::1]"),
        ({"Host": "127.0.0.1.evil.example"}, "not '127.0.0.1.evil.example'"),
        ({"Host": "localhost.evil.example"}, "not 'localhost.evil.example'"),
        ({"Host": "[::1].evil.example"}, "not '[::1].evil.example'"),
        ({"Host": "evil.example@127.0.0.1"}, "not 'evil.example@127.0.0.1'"),
        ({"Host": "192.168.1.1"}, "not '192.168.1.1'"),
        ({"Host": "0.0.0.0:8000"}, "not '0.0.0.0:8000'"),
        ({"Host": "[::1"}, "not '[::1'"),
        ({"Host": ""}, "not ''"),
    ],
    ids=str,
)
def test_other_origins_and_host_names_are_refused(service, headers, says):
    app = create_app(service)
    assert statuses(app, headers) == {403}
    with TestClient(app, base_url=PLACE) as client:
        response = client.post("/v1/completions", content=BODY, headers=headers)
    assert says in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.headers["connection"] == "close"
    assert service.thread.engine.metrics.submitted == 0


def test_with_a_key_origin_and_host_are_not_checked(service):
    headers = {"Authorization": "Bearer a key", "Host": "mine.example", "Origin": "http://other.example"}
    assert statuses(create_app(service, key="a key"), headers) == {200, 404}


def test_insecure_server_accepts_any_host_but_only_its_own_origin(service):
    app = create_app(service, host="0.0.0.0")
    assert statuses(app, {"Host": "mine.example"}) == {200, 404}
    assert statuses(app, {"Host": "mine.example", "Origin": "http://mine.example"}) == {200, 404}
    assert statuses(app, {"Host": "mine.example", "Origin": "http://other.example"}) == {403}


@pytest.mark.parametrize("host", ["", "127.1", "2130706433", "localhost.", "::ffff:192.168.0.1", "[::1]", "\u0661"])
def test_other_names_are_not_loopback(host):
    assert not is_loopback(host)
