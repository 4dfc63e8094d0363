"""Attention of converted models in FP8: found by transformers' interface, masks kept, taken back exactly."""

import copy

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.numerics import sqnr_db

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
TOKENS = torch.arange(48).view(2, 24) % 64


def model_of(name, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def logits(model, **inputs):
    with torch.no_grad():
        return model(input_ids=TOKENS, **inputs).logits


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral", "Mistral"])
def test_a_models_attention_runs_and_is_restored_exactly(name):
    model = model_of(name, **({"sliding_window": 8} if name == "Mistral" else {}))
    before, keys, implementation = logits(model), list(model.state_dict()), model.config._attn_implementation
    report = octavo.convert(model, "bf16", attention="tensorwise")
    assert report.attention == tuple(f"model.layers.{i}.self_attn" for i in range(2))
    assert "the attention of 2 modules multiplies in FP8" in str(report)
    assert list(model.state_dict()) == keys
    assert 20 < sqnr_db(before, logits(model)) < 70
    with octavo.autocast(enabled=False):
        assert torch.allclose(logits(model), before, atol=1e-5)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    octavo.restore(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model), before)


def test_padding_is_not_seen():
    model = model_of("Llama")
    octavo.convert(model, "bf16", attention="tensorwise")
    mask = torch.ones_like(TOKENS)
    mask[1, 20:] = 0
    padded = logits(model, attention_mask=mask)
    with torch.no_grad():
        short = model(input_ids=TOKENS[1:, :20]).logits
    assert torch.allclose(padded[1, :20], short[0], atol=2e-2)


def test_generation_and_files_go_on(tmp_path):
    model = model_of("Llama")
    octavo.convert(model, "bf16", attention="rowwise")
    tokens = model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False)
    assert tokens.shape[1] == 28
    model.save_pretrained(tmp_path)
    assert "octavo" not in (tmp_path / "config.json").read_text()
    assert torch.isfinite(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))).all()


@pytest.mark.long
def test_training_with_it_learns_as_in_high_precision():
    losses = []
    for attention in (None, "tensorwise"):
        model = model_of("Llama").train()
        octavo.convert(model, "tensorwise", attention=attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(30):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] < 2.5
    assert abs(losses[1] - losses[0]) < 0.15 * losses[0]


def test_another_conversion_keeps_it_and_bf16_takes_it_back():
    model = model_of("Llama")
    before = logits(model)
    octavo.convert(model, "bf16", attention="tensorwise")
    assert len(octavo.convert(model, "bf16").attention) == 2
    assert octavo.convert(model, "bf16", attention="bf16").attention == ()
    octavo.restore(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [("Gemma2", {"query_pre_attn_scalar": 16}, "caps its scores"), ("GptOss", {"num_local_experts": 4}, "has sinks")],
)
def test_kinds_of_attention_that_it_does_not_compute_are_refused(name, options, words):
    model = model_of(name, **options)
    octavo.convert(model, "bf16", attention="tensorwise")
    with pytest.raises(ConfigError, match=words):
        logits(model)


def test_models_without_attention_and_other_scales_are_refused_before_anything_changes():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(ConfigError, match="no attention"):
        octavo.convert(model, attention="tensorwise")
    llama = model_of("Llama")
    with pytest.raises(ConfigError, match="from its tensors"):
        octavo.convert(llama, attention="delayed")
    assert type(model[0]) is torch.nn.Linear
    assert not any(isinstance(module, octavo.nn.Linear) for module in llama.modules())


def test_what_a_model_says_of_causality_in_a_call_counts_more_than_its_module():
    """Llama 4's vision tower has no ``is_causal`` and passes False; Qwen2-VL's has one that its calls override."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 8, "patch_size": 2}
    config = llama4.Llama4VisionConfig(**sizes, attn_implementation="sdpa")
    torch.manual_seed(0)
    attention, turns = llama4.Llama4VisionAttention(config).eval(), llama4.Llama4VisionRotaryEmbedding(config)
    x = torch.randn(1, 17, 32)

    def results():
        patches = x.clone().requires_grad_()
        y = attention(patches, turns(patches))[0]
        return y.detach(), torch.autograd.grad(y[:, 0].sum(), patches)[0]

    exact, seen = results()
    octavo.convert(attention, "bf16", attention="tensorwise")
    found, seen_in_fp8 = results()
    assert seen[0, 1:].any()
    assert seen_in_fp8[0, 1:].any(), "the first patch sees those after it"
    assert sqnr_db(exact, found) > 20


@pytest.mark.parametrize("own", [True, False, None])
@pytest.mark.parametrize("passed", [True, False, None])
def test_causality_is_that_of_torchs_attention_in_transformers(own, passed):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from octavo.convert.attention import _attend, _InterfaceAttention

    module = torch.nn.Module()
    if own is not None:
        module.is_causal = own
    module.fp8_attention = _InterfaceAttention(causal=False)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 9, 16)
    given = {} if passed is None else {"is_causal": passed}
    expected, found = (function(module, q, k, v, None, **given)[0] for function in (sdpa_attention_forward, _attend))
    assert torch.allclose(found, expected, atol=1e-5)


def test_octavos_own_attention_is_found():
    layer = octavo.nn.TransformerLayer(32, 64, 4, recipe="bf16")
    assert octavo.convert(layer, "bf16", attention="mxfp8").attention == ("self_attention.attention",)
    octavo.restore(layer)
    assert layer.self_attention.attention.recipe is None
