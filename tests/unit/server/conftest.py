"""A server of a tiny model whose every token is a byte, in this process."""

import pytest
from starlette.testclient import TestClient

from octavo.inference import Engine, EngineConfig, EngineThread
from octavo.server import ChatTemplate, Limits, Service, create_app
from tests.unit.inference.conftest import byte_runner, byte_tokenizer

__all__ = ["PLACE", "byte_runner", "byte_tokenizer"]

PLACE = "http://127.0.0.1"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def new_service(byte_runner, byte_tokenizer):
    """Makes services, whose engines have nothing left at the end."""
    made = []

    def make(*, runner=byte_runner, template=TEMPLATE, limits=None, **settings):
        thread = EngineThread(Engine(runner, byte_tokenizer, config=EngineConfig(**settings)))
        service = Service(
            name="tiny",
            thread=thread,
            tokenizer=byte_tokenizer,
            template=ChatTemplate(template) if isinstance(template, str) else template,
            limits=limits or Limits(max_tokens=300),
        )
        made.append(service)
        return service

    yield make
    for service in made:
        assert service.thread.drain(60)
        assert service.thread.engine.load.pages_used == 0
        service.close()


@pytest.fixture
def service(new_service):
    return new_service()


@pytest.fixture
def client(service):
    with TestClient(create_app(service), base_url=PLACE) as made:
        yield made
