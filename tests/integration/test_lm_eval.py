"""lm-eval's ``local-completions`` as it comes, against the server; its sums are compared with transformers' own model.

Where lm-eval is not installed (``pip install 'lm-eval[api]'``) the test skips and says so. Nothing is fetched: the task
and its questions are files of the test's.
"""

import json
import threading
from typing import Any

import pytest
import torch

from octavo.formats import FP32
from octavo.inference import Engine, EngineConfig, EngineThread, load_served_model
from octavo.models.llama_folder import write_tokenizer
from octavo.server import Address, Limits, Server, Service
from octavo.text.tokenizer import end_of_text_id, train_tokenizer
from tests.tiny_llama import tiny_hugging_face_config

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
tasks = pytest.importorskip("lm_eval.tasks")
QUESTIONS: list[dict[str, Any]] = [
    {"first": "two times three is", "ends": [" six", " seven", " a number"], "right": 0},
    {"first": "some words that are", "ends": [" read", " before", " read before anything else"], "right": 2},
    {"first": "a", "ends": [" b", " c", " some words"], "right": 1},
]
TASKS = {
    "ends": """
task: ends
output_type: multiple_choice
doc_to_text: "{{first}}"
doc_to_choice: "{{ends}}"
doc_to_target: right
metric_list: [{metric: acc}]
""",
    "said": """
task: said
output_type: generate_until
doc_to_text: "{{first}}"
doc_to_target: "{{ends[right]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def folder(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tiny_hugging_face_config(**shape, max_position_embeddings=256, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    text = [one["first"] + "".join(one["ends"]) for one in QUESTIONS]
    tokenizer = train_tokenizer(text * 3, vocab_size=300)
    end = end_of_text_id(tokenizer)
    write_tokenizer(tmp_path / "model", tokenizer, context=256, bos_id=end, eos_id=end)
    return tmp_path / "model"


@pytest.fixture
def place(folder):
    """The address of a server of that model."""
    served = load_served_model(folder, recipe="bf16")
    engine = Engine(served.runner, served.tokenizer, config=EngineConfig(cache_format=FP32), end_ids=served.end_ids)
    service = Service(
        name="tiny", thread=EngineThread(engine), tokenizer=served.tokenizer, template=None, limits=Limits()
    )
    listening, ready = Address(port=0).bind(), threading.Event()
    server = Server(service, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    assert ready.wait(60)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
    server.drain()
    thread.join(60)


def test_local_completions_gets_what_transformers_computes(folder, place, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    source = f"dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {questions}}}}}\n"
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task + source)
    asked = {"base_url": place, "model": "tiny", "tokenizer": str(folder), "num_concurrent": 3, "max_retries": 1}
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    ours, theirs = (
        lm_eval.simple_evaluate(model, model_args=how, tasks=[*TASKS], task_manager=manager, device="cpu")["samples"]
        for model, how in (("local-completions", asked), ("hf", {"pretrained": str(folder), "dtype": "float32"}))
    )
    for one, other in zip(ours["ends"], theirs["ends"], strict=True):
        sums = [[float(answer[0][0]) for answer in sample["resps"]] for sample in (one, other)]
        assert sums[0] == pytest.approx(sums[1], abs=1e-3)
        assert [answer[0][1] for answer in one["resps"]] == [answer[0][1] for answer in other["resps"]]
    assert [one["resps"] for one in ours["said"]] == [one["resps"] for one in theirs["said"]]
