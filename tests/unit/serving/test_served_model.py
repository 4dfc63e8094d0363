"""Models from where users have them, beside transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import octavo
from octavo.errors import CheckpointError
from octavo.export import save_quantized
from octavo.language_model import LanguageModel
from octavo.models import Llama, LlamaConfig
from octavo.serving import load_served_model
from tests.unit.test_language_model import hugging_face_folder

SHAPE = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_positions=32,
    rope_theta=5000.0,
)
TOKENS = torch.arange(20) * 7 % 300


@pytest.fixture
def folder(tmp_path):
    hugging_face_folder(tmp_path, Llama(SHAPE, seed=3))
    return tmp_path


def change(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def add_biases(path, *names):
    """Of the layers of every attention, as a model that has them is stored."""
    tensors = load_file(path)
    rows = {name: len(tensor) for name, tensor in tensors.items() if name.split(".")[-2] in names}
    biases = {name.replace("weight", "bias"): torch.zeros(count) for name, count in rows.items()}
    assert biases
    save_file(tensors | biases, path, metadata={"format": "pt"})


def test_a_hugging_face_folder_is_octavo_s_llama(folder):
    from transformers import LlamaForCausalLM

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    served = load_served_model(folder)
    assert (served.runner.config, served.end_ids, served.chat_template) == (SHAPE, (5, 7), "{{ messages }}")
    logits = served.runner(TOKENS, served.runner.new_cache(), every=True)
    theirs = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = theirs(TOKENS[None]).logits[0]
    assert float((logits - wanted).norm() / wanted.norm()) < 0.1  # FP8's own
    assert float(torch.nn.functional.cosine_similarity(logits, wanted).min()) > 0.99


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "its type is 'qwen2', not 'llama'"),
        ({"hidden_act": "gelu"}, "its MLP has 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rotary positions are 'linear'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_models_that_are_no_llama_are_refused(folder, settings, says):
    change(folder / "config.json", **settings)
    if settings.get("model_type") == "qwen2":
        add_biases(folder / "model.safetensors", "q_proj", "k_proj", "v_proj")
    with pytest.raises(CheckpointError, match=says):
        load_served_model(folder)


def test_a_template_may_name_tokens_however_they_are_written(folder):
    record = {"__type": "AddedToken", "content": "<s>", "lstrip": False}
    change(folder / "tokenizer_config.json", bos_token=record, eos_token="</s>")
    assert load_served_model(folder).template_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(("given", "ends"), [(5, (5,)), ([5, 7], (5, 7)), (None, ())])
def test_a_folder_in_fp8_ends_and_chats_as_its_files_say(tmp_path, byte_tokenizer, given, ends):
    made = LanguageModel(model=Llama(SHAPE, seed=3), tokenizer=byte_tokenizer, context=32, source="made")
    octavo.convert(made.model, "rowwise")
    save_quantized(made, tmp_path, verify_folder=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    served = load_served_model(tmp_path)
    assert (served.end_ids, served.chat_template) == (ends, "{{ messages }}")


def test_an_end_that_is_no_token_is_refused(folder):
    change(folder / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(CheckpointError, match="eos_token_id"):
        load_served_model(folder)


def test_biases_are_refused(folder):
    change(folder / "config.json", attention_bias=True)
    add_biases(folder / "model.safetensors", "q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(CheckpointError, match="its layers have biases"):
        load_served_model(folder)


def test_a_gguf_file(tmp_path):
    from benchmarks import smollm2

    path = smollm2.cached()
    if path is None:
        pytest.skip("needs build/models (python -m benchmarks.smollm2)")
    served = load_served_model(path)
    assert served.end_ids == (2,)
    assert served.chat_template is not None
    assert served.template_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
