"""``/metrics`` is what the engine counted, read by Prometheus' own parser."""

import time

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import octavo
from octavo.inference import Engine, EngineThread, ModelRunner
from octavo.models import Llama
from octavo.server import Limits, Service, create_app
from tests.tiny_llama import tiny_llama_config
from tests.unit.server.conftest import PLACE


def samples(client):
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(response.text)
    return {(own.name, *sorted(own.labels.items())): own.value for family in families for own in family.samples}


def test_metrics_match_engine_counters(client, service):
    before = samples(client)
    assert before[("octavo_requests_submitted_total",)] == 0
    body = {"model": "tiny", "prompt": "x" * 70, "max_tokens": 5, "n": 2, "seed": 1}
    for _ in range(2):
        assert client.post("/v1/completions", json=body).status_code == 200
    while service.thread.engine.load.pages_used:  # an answer is told before its request is counted as finished
        time.sleep(0.01)
    after, again = samples(client), samples(client)
    assert after == again
    own, load = service.thread.engine.metrics, service.thread.engine.load
    assert after[("octavo_requests_submitted_total",)] == own.submitted == 4
    assert after[("octavo_requests_finished_total", ("reason", "length"))] == 4
    assert after[("octavo_requests_finished_total", ("reason", "cancelled"))] == 0
    assert after[("octavo_answer_tokens_total",)] == own.answer_tokens == 20
    assert after[("octavo_prompt_tokens_total",)] == 280
    assert after[("octavo_prompt_tokens_reused_total",)] == own.reused_tokens >= 128
    assert after[("octavo_token_seconds_count",)] == own.token_s.count == 16
    assert after[("octavo_token_seconds_bucket", ("le", "+Inf"))] == 16
    assert after[("octavo_first_token_seconds_sum",)] == own.first_token_s.total
    assert after[("octavo_answer_seconds_bucket", ("le", "60.0"))] == sum(own.answer_s.counts[:-1])
    pages = {state: after[("octavo_cache_pages", ("state", state))] for state in ("used", "idle", "free")}
    assert (pages["used"], pages["idle"], sum(pages.values())) == (0, load.pages_idle, load.pages)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-static"])
def test_saturated_elements_are_counted(byte_tokenizer, recipe):
    """A model calibrated on one token clips others; 4 inputs of a layer are cast, for every token once."""
    config = tiny_llama_config(vocab_size=256)
    model = Llama(config, seed=3).requires_grad_(False)
    octavo.calibrate(model, [torch.tensor([[7]])]).apply(model, hold_weights=True)
    engine = Engine(ModelRunner(model, recipe=recipe), byte_tokenizer)
    service = Service(
        name="tiny", thread=EngineThread(engine), tokenizer=byte_tokenizer, template=None, limits=Limits(max_tokens=8)
    )
    with TestClient(create_app(service), base_url=PLACE) as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": "many words", "max_tokens": 4})
        found = samples(client)
    assert service.thread.drain(60)
    tokens = found[("octavo_rows_total",)] if recipe == "fp8-static" else 0
    assert found[("octavo_cast_elements_total",)] == tokens * 2 * (3 * 32 + 64)
    clipped = found[("octavo_saturated_elements_total",)]
    assert 0 < clipped < found[("octavo_cast_elements_total",)] if recipe == "fp8-static" else clipped == 0
