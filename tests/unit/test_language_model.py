import copy
import json
import shutil
import socket
from dataclasses import replace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks import smollm2
from octavo.errors import CheckpointError, ConfigError
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import Llama
from octavo.models.sources import SourceKind, kind_of, located
from octavo.text.tokenizer import train_tokenizer
from octavo.training.config import Device
from tests.tiny_llama import tiny_llama_config

SHAPE = tiny_llama_config(max_positions=32)
TOKENS = torch.arange(20).view(2, 10) * 7 % 300


def hugging_face_folder(folder, model):
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    shape = model.config
    theirs = LlamaForCausalLM(
        TheirConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=shape.max_positions,
            rms_norm_eps=shape.rms_norm_eps,
            tie_word_embeddings=shape.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )
    )
    theirs.load_state_dict(model.state_dict())
    theirs.save_pretrained(folder)
    tokenizer = train_tokenizer(["some text, some more text"] * 3, vocab_size=shape.vocab_size)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def ours():
    return Llama(SHAPE, seed=3).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, ours):
    made = tmp_path_factory.mktemp("hf")
    hugging_face_folder(made, ours)
    return made


def test_a_hugging_face_folder(ours, folder):
    loaded = load_language_model(folder)
    assert isinstance(loaded.tokenizer, Tokenizer)
    assert loaded.context == 32
    with torch.no_grad():
        torch.testing.assert_close(loaded.logits(TOKENS), ours(TOKENS), rtol=1e-4, atol=1e-5)


def test_keys_and_values_are_those_of_both(ours, folder):
    theirs = load_language_model(folder)
    seen = []
    for model in (LanguageModel(model=ours, tokenizer=theirs.tokenizer, context=32, source="ours"), theirs):
        passed: list[tuple[int, torch.Tensor, torch.Tensor]] = []

        def halve(layer, keys, values, kept=passed):
            kept.append((layer, keys, values))
            return keys / 2, values / 2

        with torch.no_grad():
            found = model.logits(TOKENS, halve)
            plain = model.logits(TOKENS) if model is theirs else None
        assert [layer for layer, *_ in passed] == [0, 1]
        assert passed[0][1].shape == (2, 10, SHAPE.num_kv_heads, SHAPE.head_dim)
        if plain is not None:
            assert not torch.allclose(plain, found)
        seen.append((found, passed))
    (a, ours_passed), (b, theirs_passed) = seen
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for (_, *mine), (_, *other) in zip(ours_passed, theirs_passed, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not torch.equal(a, ours(TOKENS)), "attention read something else outside of the block too"


def test_interrupted_layer_hook_leaves_later_logits_unchanged(ours, folder):
    model = LanguageModel(model=ours, tokenizer=load_language_model(folder).tokenizer, context=32, source="ours")
    with torch.no_grad():
        before = model.logits(TOKENS)
        with pytest.raises(RuntimeError, match="stop"):
            model.logits(TOKENS, _stop)
        assert torch.equal(before, model.logits(TOKENS))


def _stop(layer, keys, values):
    raise RuntimeError("stop")


@pytest.mark.skipif(smollm2.cached() is None, reason="SmolLM2 is not there: python -m benchmarks.smollm2")
def test_a_gguf_file():
    loaded = load_language_model(smollm2.model_path())
    assert loaded.context == 8192
    assert loaded.tokenizer.encode("The capital").ids


def test_paths_that_hold_no_model_are_refused(tmp_path, folder):
    with pytest.raises(CheckpointError, match="is not a model; give a run's folder"):
        load_language_model(tmp_path)
    with pytest.raises(ConfigError, match="there is no"):
        load_language_model(tmp_path / "missing" / "deep")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="transformers cannot read"):
        load_language_model(broken)


def test_folder_without_a_tokenizer_is_refused(tmp_path, ours):
    hugging_face_folder(tmp_path, ours)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(
        CheckpointError, match=r"no tokenizer in .*; put the model's tokenizer\.json .* \(it says: "
    ) as said:
        load_language_model(tmp_path)
    theirs = " ".join(str(said.value.__cause__).split())
    assert str(said.value).endswith(f"(it says: {theirs})")
    assert "\n" not in str(said.value)


def test_mistyped_path_is_refused_without_network_access(tmp_path, monkeypatch):
    def connect(*_: object) -> None:
        raise AssertionError("a network was asked")

    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", connect)
    for slip in ("runs/dmo", "urns/demo", "demo", "./runs/dmo", "runs/demo/latest"):
        with pytest.raises(ConfigError, match=f"there is no '{slip}'; give a run's folder"):
            load_language_model(slip)


def test_hub_is_queried_only_when_enabled(folder, monkeypatch):
    """And gives safetensors and text; a path that exists is never asked for."""
    asked = []

    def snapshot_download(name, *, local_files_only, **patterns):
        asked.append(name)
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        assert "*.safetensors" in patterns["allow_patterns"]
        assert not any(pattern in ("*", "*.bin", "*.pt", "*.pth") for pattern in patterns["allow_patterns"])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert located(folder, hub=True) == folder
    assert asked == []
    with pytest.raises(ConfigError, match=r"there is no 'some/model'; .*; --hub downloads ORG/NAME"):
        located("some/model")
    assert located("some/model", hub=True) == folder


def test_a_name_in_the_cache_is_read_without_a_network(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert kind_of("some/model") is SourceKind.HUGGING_FACE
    loaded = load_language_model("some/model")
    assert loaded.source == str(snapshot)
    assert torch.equal(loaded.logits(TOKENS), load_language_model(folder).logits(TOKENS))


class Mischief:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_is_not_opened(folder, tmp_path):
    copied = changed(folder, tmp_path)
    (copied / "model.safetensors").unlink()
    torch.save({"weight": Mischief(tmp_path / "opened")}, copied / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"cannot read .* model.safetensors"):
        load_language_model(copied)
    assert not (tmp_path / "opened").exists()


def test_an_adapter_is_not_put_onto_a_model_from_elsewhere(folder, tmp_path):
    copied = changed(folder, tmp_path)
    (copied / "adapter_config.json").write_text('{"base_model_name_or_path": "another/model"}')
    with pytest.raises(CheckpointError, match="holds an adapter"):
        load_language_model(copied)


def changed(folder, tmp_path, *, config=None, tensors=lambda _: None):
    """A copy of a folder, with more in its config.json and other tensors."""
    copied = tmp_path / "changed"
    shutil.copytree(folder, copied)
    record = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(record | (config or {})))
    found = load_file(copied / "model.safetensors")
    tensors(found)
    save_file(found, copied / "model.safetensors", metadata={"format": "pt"})
    return copied


@pytest.mark.parametrize("given", [{"quant_method": "foo"}, {"quant_method": []}, {}, [], {"bits": 8}])
def test_an_unknown_quantization_is_never_taken_for_weights(folder, tmp_path, given):
    copied = changed(folder, tmp_path, config={"quantization_config": given})
    with pytest.raises(CheckpointError, match="quant_method"):
        load_language_model(copied)


NORM, PROJ = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
UNEXPLAINED = {
    "codes": (lambda t: t.update({PROJ: t[PROJ].to(torch.float8_e4m3fn)}), "FP8 codes, but config.json has no"),
    "one too many": (lambda t: t.update({f"{PROJ}_scale": torch.ones(1)}), f"without {PROJ}_scale, which its model"),
    "one too few": (lambda t: t.pop(NORM), f"without {NORM}, which is not there"),
}


@pytest.mark.parametrize("fault", UNEXPLAINED)
def test_a_plain_folder_has_just_the_tensors_of_its_model(folder, tmp_path, fault):
    change, match = UNEXPLAINED[fault]
    with pytest.raises(CheckpointError, match=match):
        load_language_model(changed(folder, tmp_path, tensors=change))


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        load_language_model("nowhere.gguf", device=Device.CUDA)


def test_language_model_reports_its_device(ours):
    model = LanguageModel(model=ours, tokenizer=train_tokenizer(["text"], vocab_size=300), context=32, source="a test")
    assert model.device == torch.device("cpu")
    assert replace(model, model=copy.deepcopy(ours).to("meta")).device == torch.device("meta")
