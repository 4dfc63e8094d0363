"""``octavo bench serve``: a whole run on a tiny model, one on a server, and what is refused."""

import json
import threading

import pytest

from benchmarks.hopper.reading import load_report
from octavo.inference import Engine, EngineThread, load_served_model
from octavo.models import Llama
from octavo.models.llama_folder import write_llama, write_tokenizer
from octavo.server import Address, Limits, Server, Service
from octavo.text.tokenizer import train_tokenizer
from tests.tiny_llama import tiny_llama_config

SMALL = ["--prompt", 12, "--answer", 3, "--rounds", 2, "--requests", 1]


@pytest.fixture
def folder(tmp_path):
    config = tiny_llama_config(num_layers=1, num_heads=2, num_kv_heads=1, max_positions=128, tie_embeddings=True)
    (tmp_path / "model").mkdir()
    write_llama(tmp_path / "model", Llama(config, seed=1))
    tokenizer = train_tokenizer(["some text, some more text"] * 3, vocab_size=300)
    write_tokenizer(tmp_path / "model", tokenizer, context=128)
    return tmp_path / "model"


def sections(raw):
    return {section["title"]: section for section in raw["parts"][0]["sections"]}


def test_recipes_are_compared(octavo, folder, tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    out = tmp_path / "results"
    done = octavo("bench", "serve", folder, "--batch", "1,2", "--json", "--out", out, *SMALL)
    assert done.exit_code == 0, done.stderr
    found = sections(json.loads(done.stdout))
    loads = [f"{kind}, {batch} at once" for kind in ("prefill", "decode") for batch in (1, 2)]
    assert [*found] == [*loads, "open loop", "memory of weights, and the bars"]
    for title in [*loads, "open loop"]:
        assert [row[0] for row in found[title]["rows"]] == ["bf16", "int8", "fp8"]
    runs = found["decode, 2 at once"]["raw"]["runs"]
    assert [run["tokens"] for run in runs.values()] == [[6, 6]] * 3
    sizes = found["memory of weights, and the bars"]["raw"]["weight_bytes"]
    assert sizes["fp8"] == sizes["int8"] < sizes["bf16"]
    assert sorted(path.suffix for path in out.iterdir()) == [".html", ".js", ".json", ".md"]
    (written,) = out.glob("serving_*.json")
    assert load_report(written).theme == "serving"


def test_a_table_for_a_terminal(octavo, folder):
    done = octavo("bench", "serve", folder, "--recipes", "fp8,bf16", "--batch", "1", *SMALL)
    assert done.exit_code == 0, done.stderr
    assert "decode, 1 at once" in done.stdout
    assert "weights of fp8 over bf16's" in done.stdout


def test_a_server_over_http(octavo, folder):
    served = load_served_model(folder)
    thread = EngineThread(Engine(served.runner, served.tokenizer))
    service = Service(name="tiny", thread=thread, tokenizer=served.tokenizer, template=None, limits=Limits())
    ready = threading.Event()
    server = Server(service, on_ready=ready.set)
    with Address(port=0).bind() as listening:
        running = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        running.start()
        try:
            assert ready.wait(30)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            for api in ("completions", "kserve"):
                options = ["--api", api, "--batch", "1,2", "--json", "--name", "tiny"]
                done = octavo("bench", "serve", "--url", url, *options, *SMALL)
                assert done.exit_code == 0, done.stderr
                runs = sections(json.loads(done.stdout))["decode, 2 at once"]["raw"]["runs"]
                assert [sum(run["tokens"]) for run in runs.values()] == [12]
            refused = octavo("bench", "serve", "--url", url, "--name", "another", *SMALL)
            assert refused.exit_code == 2
            assert "answered 404" in refused.stderr
        finally:
            server.should_exit = True
            running.join(30)
            thread.drain(30)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a MODEL, or one or more --url"),
        (["model", "--url", "http://x"], "but not both"),
        (["model", "--recipes", "fp4"], "recipe must be one of"),
        (["model", "--recipes", "fp8,fp8"], "each recipe once"),
        (["model", "--batch", "1,x"], "--batch takes whole numbers"),
        (["model", "--batch", "0"], "a batch must be"),
        (["model", "--rounds", "0"], "rounds must be"),
        (["--url", "http://x", "--url", "http://x"], "repeats one"),
        (["--url", "http://x", "--name", "a", "--name", "b"], "--name is given 2 times for 1 --url"),
        (["--url", "http://127.0.0.1:9"], "did not answer"),
        (["--url", "http://[::1"], "'http://[::1' is not the address of a server"),
        (
            ["--url", "http://127.0.0.1:9", "--api-key-file", __file__],
            "holds no key; write the key into it as one line of ASCII",
        ),
    ],
)
def test_bad_input_is_one_sentence(octavo, arguments, words):
    done = octavo("bench", "serve", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
