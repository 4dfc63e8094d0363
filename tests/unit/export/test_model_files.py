import json

import pytest

from benchmarks import smollm2
from octavo.export.model_files import companions_of
from octavo.language_model import LanguageModel
from octavo.models import load_gguf
from octavo.text.tokenizer import END_OF_TEXT
from tests.unit.quantization.tiny_models import language_model


def test_a_model_of_octavos():
    model = language_model()
    found = companions_of(model)
    ends = model.tokenizer.token_to_id(END_OF_TEXT)
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert found.config["eos_token_id"] == ends
    assert json.loads(found.files["generation_config.json"]) == {"eos_token_id": ends}
    assert json.loads(found.files["tokenizer_config.json"])["eos_token"] == END_OF_TEXT
    assert found.files["tokenizer.json"].decode() == model.tokenizer.to_str()


def test_a_folder_hands_on_its_files(tmp_path):
    model = language_model()
    kept = {"tokenizer_config.json": b'{"a": 1}', "chat_template.jinja": b"{{ x }}", "generation_config.json": b"{}"}
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "notes.txt").write_text("not mine to give")
    config = {"model_type": "llama", "anything": 3, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = companions_of(LanguageModel(model=model.model, tokenizer=model.tokenizer, context=64, source=str(tmp_path)))
    assert found.config == {"model_type": "llama", "anything": 3}
    assert kept.items() <= found.files.items()
    assert found.files.keys() == {*kept, "tokenizer.json"}


@pytest.mark.skipif(smollm2.cached() is None, reason="SmolLM2 is not there: python -m benchmarks.smollm2")
def test_a_gguf_file():
    path = smollm2.model_path()
    loaded = load_gguf(path)
    found = companions_of(LanguageModel(model=loaded.model, tokenizer=loaded.tokenizer, context=8192, source=str(path)))
    assert json.loads(found.files["generation_config.json"]) == {
        "bos_token_id": loaded.bos_id, "eos_token_id": loaded.eos_id,
    }  # fmt: skip
    assert found.config["eos_token_id"] == loaded.eos_id
    assert found.files["chat_template.jinja"].decode() == loaded.chat_template
    settings = json.loads(found.files["tokenizer_config.json"])
    assert loaded.tokenizer.token_to_id(settings["eos_token"]) == loaded.eos_id
