"""Models from where users have them, beside transformers."""

import json

import pytest
import torch

import octavo
from octavo.errors import CheckpointError, ConfigError
from octavo.export import save_quantized
from octavo.formats import FP32
from octavo.inference import Engine, EngineConfig, Event, SamplingParams, load_served_model
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config
from tests.unit.test_language_model import hugging_face_folder

SHAPE = tiny_llama_config(max_positions=32, rope_theta=5000.0)
TOKENS = torch.arange(20) * 7 % 300


@pytest.fixture
def folder(tmp_path):
    hugging_face_folder(tmp_path, Llama(SHAPE, seed=3))
    return tmp_path


def change(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_hugging_face_folder_matches_llama(folder):
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
        ({"model_type": "granite", "architectures": ["GraniteForCausalLM"]}, "its type is 'granite', not"),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
            r"its attention has a sliding window \(sliding_window is 8\)",
        ),
        ({"hidden_act": "gelu"}, "its MLP has 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rotary positions are 'linear'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_architectures_are_refused(folder, settings, says):
    change(folder / "config.json", **settings)
    with pytest.raises(CheckpointError, match=says):
        load_served_model(folder)


def test_template_tokens_are_read_from_strings_and_records(folder):
    record = {"__type": "AddedToken", "content": "<s>", "lstrip": False}
    change(folder / "tokenizer_config.json", bos_token=record, eos_token="</s>")
    assert load_served_model(folder).template_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(("given", "ends"), [(5, (5,)), ([5, 7], (5, 7)), (None, ())])
def test_fp8_folder_has_end_tokens_and_chat_template(tmp_path, byte_tokenizer, given, ends):
    made = LanguageModel(model=Llama(SHAPE, seed=3), tokenizer=byte_tokenizer, context=32, source="made")
    octavo.convert(made.model, "rowwise")
    save_quantized(made, tmp_path, verify_folder=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    served = load_served_model(tmp_path)
    assert (served.end_ids, served.chat_template) == (ends, "{{ messages }}")


def test_a_chat_template_that_is_not_utf8_is_refused(tmp_path, byte_tokenizer):
    made = LanguageModel(model=Llama(SHAPE, seed=3), tokenizer=byte_tokenizer, context=32, source="made")
    octavo.convert(made.model, "rowwise")
    save_quantized(made, tmp_path, verify_folder=False)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja' is not UTF-8 at byte 3"):
        load_served_model(tmp_path)


def test_invalid_eos_token_id_is_refused(folder):
    change(folder / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(CheckpointError, match="eos_token_id"):
        load_served_model(folder)


SCALED = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def of_transformers(name, folder, **settings):
    """A tiny model of transformers' own making, its norms and biases large enough to matter."""
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = getattr(transformers, f"{name}Config")(**common, **settings, bos_token_id=None, eos_token_id=None)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_((parameter + 0.3 * torch.randn_like(parameter)).bfloat16())
    theirs.save_pretrained(folder)
    return theirs.eval()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Qwen3", {"head_dim": 8, "attention_bias": True}),
        ("Llama", {"head_dim": 16, "mlp_bias": True}),
        ("Llama", {"rope_parameters": SCALED}),
        ("Mistral", {"head_dim": 16, "sliding_window": 64}),
    ],
    ids=str,
)
def test_a_dense_model_is_served_with_its_biases_norms_and_heads(folder, name, settings):
    """Weights are BF16 numbers, so that the recipe bf16 rounds nothing: the logits and the greedy tokens are theirs."""
    theirs = of_transformers(name, folder, **settings)
    served = load_served_model(folder, recipe="bf16")
    with torch.no_grad():
        wanted = theirs(TOKENS[None]).logits[0]
    logits = served.runner(TOKENS, served.runner.new_cache(fmt=FP32), every=True)
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
    seen = torch.ones_like(TOKENS)[None]
    told = theirs.generate(
        TOKENS[None], attention_mask=seen, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    engine = Engine(served.runner, served.tokenizer, config=EngineConfig(cache_format=FP32, cache_positions=64))
    events: list[Event] = []
    engine.submit(TOKENS.tolist(), SamplingParams(max_tokens=24, temperature=0), events.append)
    while engine.step():
        pass
    assert [event.token for event in events] == told[0, len(TOKENS) :].tolist()


def test_static_scales_come_from_a_calibration(folder, tmp_path):
    model = load_language_model(folder)
    found = octavo.calibrate(model, [TOKENS[None]], kv_cache=True)
    found.save(tmp_path / "scales")
    served = load_served_model(folder, recipe="fp8-static", calibration=tmp_path / "scales")
    served.runner(TOKENS, served.runner.new_cache())
    inputs = {"q_proj": 32, "o_proj": 32, "gate_proj": 32, "down_proj": 64}  # of a layer, read by one product each
    assert served.runner.saturation.elements == len(TOKENS) * SHAPE.num_layers * sum(inputs.values())
    found.apply(model)
    with torch.no_grad():
        wanted = model.logits(TOKENS[None])[0]
    logits = served.runner(TOKENS, served.runner.new_cache(fmt=FP32), every=True)
    assert octavo.numerics.sqnr_db(wanted, logits) > 25  # the head's weight is E4M3 here alone


def test_calibrations_that_are_missing_or_too_many_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="fp8-static needs input scales"):
        load_served_model(folder, recipe="fp8-static")
    with pytest.raises(ConfigError, match="a calibration is for the recipe fp8-static, not for int8"):
        load_served_model(folder, recipe="int8", calibration=tmp_path)
    with pytest.raises(ConfigError, match="recipe must be one of bf16, int8, fp8, fp8-dynamic, fp8-static, not 'int4'"):
        load_served_model(folder, recipe="int4")


def test_gguf_file_is_served(tmp_path):
    from benchmarks import smollm2

    path = smollm2.cached()
    if path is None:
        pytest.skip("needs build/models (python -m benchmarks.smollm2)")
    served = load_served_model(path)
    assert served.end_ids == (2,)
    assert served.chat_template is not None
    assert served.template_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


GPT_OSS = (
    "its experts have biases and clamp their activations (swiglu_limit is 7.0), and its attention has sinks, its "
    "attention has a sliding window (sliding_window is 128), its rotary positions are 'yarn', not 'default' or 'llama3'"
)
DEEPSEEK = (
    "it has experts that every token goes to (n_shared_experts is 1) and its router chooses experts by groups (n_group "
    "is 8), and its attention reads compressed keys and values (kv_lora_rank is 512), its rotary positions are 'yarn', "
    "not 'default' or 'llama3'"
)
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}


@pytest.mark.parametrize("quantized", [{}, {"quant_method": "fp8"}, {"quant_method": "mxfp4"}], ids=str)
@pytest.mark.parametrize(
    ("name", "settings", "why"), [("GptOss", {}, GPT_OSS), ("DeepseekV3", {"rope_parameters": YARN}, DEEPSEEK)]
)
def test_what_is_missing_is_named_before_weights_are_read(tmp_path, name, settings, why, quantized):
    import transformers

    record = getattr(transformers, f"{name}Config")(**settings).to_dict()
    record |= {"quantization_config": quantized} if quantized else {}
    (tmp_path / "config.json").write_text(json.dumps(record | {"architectures": [f"{name}ForCausalLM"]}))
    (tmp_path / "model.safetensors").write_text("none")
    with pytest.raises(CheckpointError) as refusal:
        load_served_model(tmp_path)
    assert str(refusal.value) == (
        f"{str(tmp_path)!r} cannot be served: {why}; octavo serves only models of the Llama layout"
    )


def test_a_model_of_the_hub_is_refused_before_its_weights_are_downloaded(tmp_path, monkeypatch):
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(transformers.GptOssConfig().to_dict()))
    asked = []

    def snapshot_download(name, *, allow_patterns, **_):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="its attention has sinks"):
        load_served_model("some/model", hub=True)
    assert asked == [("some/model", ["config.json"])]
