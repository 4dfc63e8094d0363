"""What a service does with a prompt before the engine sees it."""

import threading
from dataclasses import replace

import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models, pre_tokenizers

from octavo.inference import EngineConfig, ServedModel
from octavo.server import Limits, Service, create_app
from octavo.server.error_responses import ResponseError
from tests.unit.server.conftest import PLACE


@pytest.mark.long
def test_requests_continue_while_a_long_prompt_is_tokenized(service, byte_tokenizer):
    """With a token of 10,000 bytes the text is no longer than 320 tokens may be, so its tokens have to be counted."""
    letters = byte_tokenizer.get_vocab()
    coarse = Tokenizer(models.BPE(vocab=letters | {"y" * 10_000: 256}, merges=[]))
    coarse.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    service = replace(service, tokenizer=coarse)
    ticks: list[None] = []
    over = threading.Event()

    def tick():
        while not over.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    with pytest.raises(ResponseError, match="the prompt has 3000000 tokens, and at most 320 are accepted"):
        service.encode("x" * 3_000_000, field="prompt")
    over.set()
    thread.join()
    assert len(ticks) > 20  # with Python's lock held there are 1 or 2


def test_encode_matches_tokenizer(service, byte_tokenizer):
    assert service.encode("Öffne, Sesam", field="prompt") == byte_tokenizer.encode("Öffne, Sesam").ids


@pytest.mark.parametrize(
    ("source", "says"),
    [("{% if %}", "is damaged: Expected an expression"), ("{{" + "(" * 10**5, "is damaged: maximum")],
)
def test_damaged_template_disables_chats_with_a_warning(byte_runner, byte_tokenizer, source, says):
    served = ServedModel(
        runner=byte_runner, tokenizer=byte_tokenizer, end_ids=(), chat_template=source, template_tokens={}
    )
    warnings: list[str] = []
    service = Service.of(served, "tiny", config=EngineConfig(), limits=Limits(), on_warning=warnings.append)
    (warning,) = warnings
    assert says in warning
    assert warning.endswith(": completions are served, and conversations are refused")
    with TestClient(create_app(service), base_url=PLACE) as client:
        talk = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
        assert client.post("/v1/chat/completions", json=talk).status_code == 400
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
    assert service.thread.drain(60)
