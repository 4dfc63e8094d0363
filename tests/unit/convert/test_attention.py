"""Attention of converted models in FP8: found by transformers' interface, masks kept, taken back exactly."""

import copy
import pickle
from typing import Any

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


def test_a_prompt_does_not_see_the_empty_places_of_a_longer_cache():
    model = model_of("Llama")
    octavo.convert(model, "bf16", attention="tensorwise")
    for masked in ({}, {"attention_mask": torch.ones_like(TOKENS)}):
        cache = transformers.StaticCache(config=model.config, max_cache_len=2 * TOKENS.shape[1])
        assert sqnr_db(logits(model), logits(model, past_key_values=cache, **masked)) > 20


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


SPARSE: dict[str, dict[str, Any]] = {
    "DeepseekV32": {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "index_topk": 4, "index_n_heads": 2, "index_head_dim": 32,
    },
    "MiniMaxM3VLText": {
        "layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["dense"], "dense_intermediate_size": 48,
        "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 2, "index_topk_blocks": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_stays_sparse(name):
    """Both build the mask of the keys that their indexer chose for "eager" and "sdpa" alone, and pass indices."""
    folder = {"DeepseekV32": "deepseek_v32", "MiniMaxM3VLText": "minimax_m3_vl"}[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    kind = getattr(module, f"{name}Model")
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**SIZES, "num_hidden_layers": 1, **SPARSE[name]})).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)

    def hidden():
        with torch.no_grad():
            return model(input_ids=TOKENS).last_hidden_state

    sparse = hidden()
    report = octavo.convert(model, "bf16", attention="rowwise")
    assert report.attention == ("layers.0.self_attn",)
    in_fp8 = hidden()
    octavo.restore(model)
    assert torch.equal(hidden(), sparse)
    for indexer in model.modules():
        for limit in ("index_topk", "topk_blocks"):
            if hasattr(indexer, limit):
                setattr(indexer, limit, 10**6)
    dense = hidden()
    assert sqnr_db(sparse, in_fp8) > 18
    assert sqnr_db(sparse, dense) < 10, "every key is another attention"


@pytest.mark.parametrize(
    ("name", "options"), [("Gemma2", {"query_pre_attn_scalar": 16}), ("GptOss", {"num_local_experts": 4})]
)
def test_models_that_torchs_attention_cannot_serve_are_refused_before_anything_changes(name, options):
    """Scores that are capped, and sinks: transformers runs them with a function of their own."""
    model = model_of(name, **options)
    before = logits(model)
    with pytest.raises(ConfigError, match=r'model\.layers\.0\.self_attn: transformers computes it with "eager"'):
        octavo.convert(model, attention="tensorwise")
    assert torch.equal(logits(model), before)
    assert not any(isinstance(module, octavo.nn.Linear) for module in model.modules())


def test_learned_biases_of_positions_are_refused_before_anything_changes():
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(ConfigError, match="takes biases of positions"):
        octavo.convert(model, attention="tensorwise")
    assert not any(isinstance(module, octavo.nn.Linear) for module in model.modules())


def test_one_that_only_some_modules_can_run_names_the_others_and_why():
    one, other = model_of("Llama"), model_of("Llama", attn_implementation="eager")
    report = octavo.convert(torch.nn.ModuleDict({"one": one, "other": other}), "bf16", attention="tensorwise")
    assert report.attention == tuple(f"one.model.layers.{i}.self_attn" for i in range(2))
    assert list(report.attention_skipped) == [f"other.model.layers.{i}.self_attn" for i in range(2)]
    assert 'other.model.layers.[0-1].self_attn (2): attention: transformers computes it with "eager"' in str(report)  # fmt: skip # noqa: E501


@pytest.mark.parametrize("keyword", ["position_bias", "s_aux", "softcap", "cache", "invented"])
def test_what_a_call_passes_that_it_does_not_compute_is_refused(keyword, monkeypatch):
    """Also what torch's function in a later version of transformers computes."""

    def of_a_later_version(module, query, key, *_, position_bias=None, cache=None, invented=None, **others):
        raise AssertionError

    registry = transformers.AttentionInterface
    monkeypatch.setattr(registry, "_global_mapping", {**registry._global_mapping, "sdpa": of_a_later_version})
    model = model_of("Llama")
    octavo.convert(model, "bf16", attention="tensorwise")
    attend, q = registry()["sdpa"], torch.ones(1, 4, 3, 16)
    attend(model.model.layers[0].self_attn, q, q, q, None, **{keyword: None, "of_another_function": 1})
    with pytest.raises(ConfigError, match=r"LlamaAttention takes .*, which attention in FP8 does not compute"):
        attend(model.model.layers[0].self_attn, q, q, q, None, **{keyword: 1})


def test_a_model_that_shares_the_configuration_stays_as_it_is():
    teacher = model_of("Llama")
    before = logits(teacher)
    student = transformers.LlamaForCausalLM(teacher.config).eval()
    student.load_state_dict(teacher.state_dict())
    octavo.convert(student, "bf16", attention="tensorwise")
    assert torch.equal(logits(teacher), before)
    assert not torch.equal(logits(student), before)
    octavo.restore(teacher)
    assert not torch.equal(logits(student), before)


def test_one_block_of_a_model_can_be_converted():
    model = model_of("Llama")
    before = logits(model)
    assert octavo.convert(model.model.layers[1], "bf16", attention="tensorwise").attention == ("self_attn",)
    assert 20 < sqnr_db(before, logits(model)) < 70


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ({"skip": ["*.layers.0.*"]}, {0: "skip pattern '*.layers.0.*'"}),
        ({"skip": ["*.layers.1.self_attn"]}, {1: "skip pattern '*.layers.1.self_attn'"}),
        ({"keep_first_blocks": 1}, {0: "block 0 of 2 is kept"}),
        ({"keep_last_blocks": 1}, {1: "block 1 of 2 is kept"}),
        (
            {"skip": ["*.layers.0.*"], "keep_last_blocks": 1},
            {0: "skip pattern '*.layers.0.*'", 1: "block 1 of 2 is kept"},
        ),
    ],
)
def test_what_keeps_layers_keeps_their_attention(arguments, left):
    model = model_of("Llama")
    report = octavo.convert(model, "bf16", attention="tensorwise", **arguments)
    paths = [f"model.layers.{i}.self_attn" for i in range(2)]
    assert report.attention == tuple(path for i, path in enumerate(paths) if i not in left)
    assert report.attention_skipped == {paths[i]: reason for i, reason in left.items()}
    attention = [model.get_submodule(path) for path in paths]
    assert [hasattr(module, "fp8_attention") for module in attention] == [i not in left for i in range(2)]


def test_kept_attention_keeps_the_recipe_that_it_has():
    model = model_of("Llama")
    octavo.convert(model, "bf16", attention="tensorwise")
    report = octavo.convert(model, "bf16", attention="bf16", keep_first_blocks=1)
    assert report.attention == ("model.layers.0.self_attn",)
    assert report.attention_skipped == {"model.layers.0.self_attn": "block 0 of 2 is kept; keeps its recipe tensorwise"}


def test_attention_that_another_function_computes_is_not_reported_as_in_fp8():
    model = model_of("Llama")
    octavo.convert(model, "bf16", attention="tensorwise")
    in_fp8 = logits(model)
    model.set_attn_implementation("eager")
    report = octavo.convert(model, "bf16")
    assert report.attention == ()
    assert list(report.attention_skipped) == [f"model.layers.{i}.self_attn" for i in range(2)]
    model.set_attn_implementation("sdpa")
    assert len(octavo.convert(model, "bf16").attention) == 2
    assert torch.equal(logits(model), in_fp8)


def test_a_function_that_is_looked_up_in_vain_is_not_reported_as_in_fp8():
    """Kosmos-2.5's vision tower asks the registry for an attribute, which it never has, and computes "eager"."""
    kosmos = pytest.importorskip("transformers.models.kosmos2_5.modeling_kosmos2_5")
    config = kosmos.Kosmos2_5VisionConfig(hidden_size=32, num_attention_heads=4, attn_implementation="sdpa")
    module = kosmos.Kosmos2_5VisionAttention(config)
    with pytest.raises(ConfigError, match='computes "eager" whatever'):
        octavo.convert(module, attention="tensorwise")


def test_a_recipe_in_high_precision_is_not_reported_as_in_fp8():
    layer = torch.nn.Sequential(octavo.nn.DotProductAttention(recipe="bf16"))
    assert octavo.convert(layer, "bf16").attention == ()


def test_a_model_from_a_file_runs_where_octavo_has_not_converted_before(monkeypatch):
    registry = transformers.AttentionInterface
    monkeypatch.setattr(registry, "_global_mapping", dict(registry._global_mapping))
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model = model_of("Llama")
    octavo.convert(model, "bf16", attention="tensorwise")
    in_fp8, written = logits(model), pickle.dumps(model)
    registry.register("sdpa", sdpa_attention_forward)  # as in a new process
    read = pickle.loads(written)
    assert torch.equal(logits(read), in_fp8)


def test_the_models_own_scale_counts():
    """Granite multiplies its scores by a number that is not 1 / sqrt(head_dim)."""
    model = model_of("Granite", attention_multiplier=1.0)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=0.2)
        torch.nn.init.normal_(layer.self_attn.k_proj.weight, std=0.2)
    before = logits(model)
    octavo.convert(model, "bf16", attention="rowwise")
    assert sqnr_db(before, logits(model)) > 20
    octavo.restore(model)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.25
    assert sqnr_db(before, logits(model)) < 10, "another scale is noticed"


def test_the_models_own_dropout_counts():
    """In training, and drawn as torch's attention draws it; in evaluation there is none."""
    model = model_of("Llama", attention_dropout=0.4, num_hidden_layers=1).train()

    def in_training():
        torch.manual_seed(3)
        return logits(model)

    expected, without = in_training(), logits(model.eval())
    octavo.convert(model, "bf16", attention="rowwise")
    assert sqnr_db(without, logits(model)) > 20
    model.train()
    assert sqnr_db(expected, in_training()) > 20
    assert sqnr_db(expected, without) < 15, "dropout is noticed"


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

    from octavo.convert.attention import _InterfaceAttention, _register

    _register()
    module = torch.nn.Module()
    if own is not None:
        module.is_causal = own
    module.fp8_attention = _InterfaceAttention(causal=False)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 9, 16)
    given = {} if passed is None else {"is_causal": passed}
    functions = sdpa_attention_forward, transformers.AttentionInterface()["sdpa"]
    assert functions[0] is not functions[1]
    expected, found = (function(module, q, k, v, None, **given)[0] for function in functions)
    assert torch.allclose(found, expected, atol=1e-5)


def test_octavos_own_attention_is_found():
    layer = octavo.nn.TransformerLayer(32, 64, 4, recipe="bf16")
    assert octavo.convert(layer, "bf16", attention="mxfp8").attention == ("self_attention.attention",)
    octavo.restore(layer)
    assert layer.self_attention.attention.recipe is None
