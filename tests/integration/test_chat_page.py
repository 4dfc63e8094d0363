"""The chat page in a real browser: it streams, stops, asks for a key, and writes what is said as text.

Chromium is driven by Playwright; where either is missing the tests skip and say so.
"""

import re
import threading
import time

import pytest

from octavo.server import Address, Limits, Server
from tests.unit.server.conftest import byte_runner, byte_tokenizer, new_service

__all__ = ["byte_runner", "byte_tokenizer", "new_service"]


@pytest.fixture
def start(new_service):
    """Starts a server and gives its address; it ends with the test."""
    begun = []

    def begin(*, key=None, **settings):
        service, listening, ready = new_service(**settings), Address(port=0).bind(), threading.Event()
        server = Server(service, key=key, on_ready=ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        begun.append((server, thread))
        assert ready.wait(60)
        return service, f"http://127.0.0.1:{listening.getsockname()[1]}/"

    yield begin
    for server, thread in begun:
        server.drain()
        thread.join(60)


@pytest.fixture
def page(browser):
    """A page, whose errors are the test's, and which asks nobody but its own server."""
    context = browser.new_context(viewport={"width": 900, "height": 700})
    made, heard, foreign = context.new_page(), [], []
    made.on("pageerror", lambda error: heard.append(str(error)))
    made.on("request", lambda sent: foreign.append(sent.url) if "//127.0.0.1:" not in sent.url else None)
    yield made
    context.close()
    assert heard == foreign == []


def test_chat_page_streams_an_answer_and_continues_the_conversation(page, start):
    service, place = start()
    page.goto(place)
    page.locator("#model", has_text="tiny").wait_for()
    page.fill("#most", "12")
    page.fill("#prompt", "<b>Hi</b> & <img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    page.locator(".facts", has_text="12 tokens in").wait_for()
    assert page.locator(".user .text").text_content() == "<b>Hi</b> & <img src=x onerror=alert(1)>"
    assert page.locator("#talk b, #talk img").count() == 0
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.fill("#prompt", "And more")
    page.click("#send")
    page.locator(".facts", has_text="tokens in").nth(1).wait_for()
    assert service.thread.engine.metrics.prompt_tokens > 2 * len("user: And more\nassistant:")
    page.click("#new")
    assert page.locator(".user, .assistant, .facts").count() == 0
    assert page.locator("#empty").is_visible()


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_stops_at_once(page, start, how, monkeypatch):
    service, place = start()
    step = service.thread.engine.step

    def slow_step():  # or it would be over too soon
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(service.thread.engine, "step", slow_step)
    page.goto(place)
    page.fill("#most", "280")
    page.fill("#prompt", "Hi")
    page.keyboard.press("Enter")
    page.locator(".assistant .text", has_text=re.compile(r"\S")).wait_for()
    page.keyboard.press("Escape") if how == "key" else page.click("#stop")
    page.locator(".facts", has_text="stopped").wait_for()
    assert page.locator("#send").is_visible()
    while not service.thread.engine.metrics.finished["cancelled"]:
        page.wait_for_timeout(10)
    assert service.thread.engine.metrics.answer_tokens < 280


def test_a_key_is_asked_for_only_where_one_is_needed(page, start):
    _, place = start(key="a key")
    page.goto(place)
    page.locator("#key").wait_for()
    page.fill("#prompt", "Hi")
    page.keyboard.press("Enter")
    page.locator(".error", has_text="needs its API key").wait_for()
    assert page.locator("#prompt").input_value() == "Hi"
    page.fill("#key", "a key")
    page.fill("#most", "4")
    page.focus("#prompt")
    page.keyboard.press("Enter")
    page.locator(".facts", has_text="4 tokens in").wait_for()


def test_without_a_key_there_is_no_field_and_a_refusal_is_shown(page, start):
    _, place = start()
    page.goto(place)
    page.locator("#model", has_text="tiny").wait_for()
    assert not page.locator("#key").is_visible()
    page.fill("#prompt", "x" * 400)
    page.keyboard.press("Enter")
    page.locator(".error", has_text="tokens, and at most 320 are accepted; shorten it").wait_for()


@pytest.mark.parametrize("width", [900, 360])
def test_a_model_without_a_chat_template_continues_a_text(page, start, width):
    service, place = start(template=None)
    shown: list[str] = []
    object.__setattr__(service, "on_prompt", shown.append)
    page.set_viewport_size({"width": width, "height": 700})
    page.goto(place)
    page.locator("#empty", has_text="it continues the text that you write").wait_for()
    assert page.locator("#send").text_content() == "Continue"
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.fill("#most", "12")
    for i, text in enumerate(("Once upon", "And then")):
        page.fill("#prompt", text)
        page.keyboard.press("Enter")
        page.locator(".facts", has_text="12 tokens in").nth(i).wait_for()
    assert shown[0] == "Once upon"
    assert shown[1].startswith("Once upon")
    assert shown[1].endswith("\nAnd then")
    assert page.locator(".error").count() == 0


@pytest.mark.long
def test_the_most_tokens_are_the_server_s(page, start):
    _, place = start(limits=Limits(max_tokens=40))
    page.goto(place)
    page.locator("#model", has_text="tiny").wait_for()
    assert (page.get_attribute("#most", "max"), page.input_value("#most")) == ("40", "20")
    page.fill("#most", "9999")
    page.fill("#prompt", "Hi")
    page.keyboard.press("Enter")
    page.locator(".facts", has_text="40 tokens in").wait_for()
    assert page.input_value("#most") == "40"


@pytest.mark.long
def test_page_follows_the_color_scheme_and_fits_a_phone(page, start, page_faults):
    _, place = start()
    page.set_viewport_size({"width": 360, "height": 640})
    page.goto(place)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 247)"
        assert light is (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page_faults(place) == []
