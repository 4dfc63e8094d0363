"""A decoder under a profile: which layers, which bits, and what copies share."""

import copy
from dataclasses import replace

import pytest
import torch

import octavo
from octavo import recipes
from octavo.engines import (
    EngineCopies,
    agree,
    agree_with_itself,
    get,
    input_amaxes,
    linear_as,
    model_as,
    profile_of_recipe,
)
from octavo.engines.model import EngineLinear
from octavo.errors import ConfigError, DataError
from octavo.language_model import logits_of
from octavo.models import Llama
from octavo.nn.fp8_weight import FP8WeightLinear
from octavo.numerics import PerRow, quantize_as
from tests.tiny_llama import tiny_llama_config
from tests.unit.quantization.tiny_models import LINEARS, language_model, windows

TOKENS = windows(1, 12)
ROWS = recipes.get("rowwise", power_of_two=False)


def decoder():
    return language_model().model


def seen_layers(model, tokens=TOKENS):
    """Input and output of each of an engine model's layers."""
    seen = {}
    for path, layer in model.layers.items():
        layer.register_forward_hook(lambda _, inputs, output, path=path: seen.update({path: (inputs[0], output)}))
    model(tokens)
    return seen


@pytest.mark.parametrize("name", ["te-block", "vllm-token", "sglang-block-ue8m0", "compressed-tensors", "octavo-block"])
def test_each_layer_is_that_of_the_profile(name):
    plain = decoder()
    profile = get(name)
    seen = seen_layers(model_as(plain, profile))
    assert len(seen) == LINEARS
    for path, (x, y) in seen.items():
        weight = plain.get_submodule(path).weight.to(profile.activations)
        assert torch.equal(y, linear_as(x, weight, profile)), path


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_octavos_recipes_give_the_logits_of_octavos_layers(recipe):
    plain = decoder()
    ours = model_as(plain, profile_of_recipe(recipes.get(recipe)))(TOKENS)
    octavo.convert(plain, recipe)
    with torch.no_grad():
        assert torch.equal(ours, plain(TOKENS))


def test_the_model_is_not_changed_and_copies_share_what_they_can():
    plain = decoder()
    before = copy.deepcopy(plain.state_dict())
    copies = EngineCopies(plain)
    first, second, third = (copies.of(get(name)) for name in ("vllm-block", "vllm-block-cuda", "octavo-token"))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.dtype is torch.float32
    assert type(plain.lm_head) is torch.nn.Linear
    path = "model.layers.0.mlp.up_proj"
    assert first.layers[path].codes is second.layers[path].codes
    tables = [model.model.get_parameter("model.embed_tokens.weight") for model in (first, second, third)]
    assert tables[0].data_ptr() == tables[1].data_ptr()
    assert tables[2].data_ptr() == plain.model.embed_tokens.weight.data_ptr()
    assert first.model.get_parameter("lm_head.weight") is tables[0]  # tied as before


def test_everything_but_fp8_is_in_the_dtype_of_the_activations():
    model = model_as(decoder(), get("vllm-token"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(TOKENS).dtype is torch.bfloat16
    wide = replace(get("vllm-token"), activations=torch.float32)
    rounded = {y.to(torch.bfloat16).equal(y) for _, y in seen_layers(model_as(decoder(), wide)).values()}
    assert rounded == {True}  # the output's dtype is a property of its own


def test_the_head_and_skipped_layers_are_those_of_the_profile():
    profile = replace(get("vllm-token"), head=True, skipped=("*.down_proj", "*.0.*"))
    paths = set(model_as(decoder(), profile).layers)
    assert "lm_head" in paths
    assert not any("down_proj" in path or ".0." in path for path in paths)
    assert len(paths) == 7
    with pytest.raises(ConfigError, match="quantizes no layer"):
        model_as(decoder(), replace(profile, head=False, skipped=("*",)))


@pytest.mark.parametrize("name", ["vllm-block-ue8m0", "sglang-block-ue8m0"])
def test_a_folder_in_fp8_keeps_its_codes_unless_the_profile_casts_again(name):
    plain = decoder().requires_grad_(False)
    octavo.convert(plain, recipes.get("blockwise", power_of_two=False), skip=["*.o_proj"], frozen="fp8")
    kept, again = model_as(plain, get("vllm-block")), model_as(plain, get(name))
    assert len(kept.layers) == LINEARS - 2
    for path, layer in kept.layers.items():
        stored = plain.get_submodule(path)
        assert isinstance(stored, FP8WeightLinear)
        assert torch.equal(layer.codes.data.view(torch.uint8), stored.stored_codes().data.view(torch.uint8))
        expected = quantize_as(stored.stored_codes().dequantize(), get(name).weight)
        assert torch.equal(again.layers[path].codes.data.view(torch.uint8), expected.data.view(torch.uint8))


def test_a_folders_codes_of_another_shape_are_refused():
    plain = decoder().requires_grad_(False)
    octavo.convert(plain, ROWS, frozen="fp8")
    for name in ("vllm-block", "vllm-block-ue8m0"):
        with pytest.raises(ConfigError, match=f"has a scale a row, and {name} reads one a 128×128 block"):
            model_as(plain, get(name))
    tensors = decoder().requires_grad_(False)
    octavo.convert(tensors, "tensorwise", frozen="fp8")
    with pytest.raises(ConfigError, match="has a scale a tensor, and vllm-block reads one a 128×128 block"):
        model_as(tensors, get("vllm-block"))
    assert len(model_as(tensors, get("vllm-token")).layers) == LINEARS  # one scale is that of every row


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_amaxes_are_the_largest_of_all_windows(order):
    plain, both = decoder(), windows(2, 12)
    linears = {path: layer for path, layer in plain.named_modules() if isinstance(layer, torch.nn.Linear)}
    amaxes = {path: list[float]() for path in linears}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, path=path: amaxes[path].append(float(given[0].abs().max())))
        for path, layer in linears.items()
    ]
    with torch.no_grad():
        for window in both:
            plain(window[None])
    for hook in hooks:
        hook.remove()
    assert {a > b for a, b in amaxes.values()} == {True, False}  # the larger one comes first, or last
    found = input_amaxes(plain, both[list(order)])
    assert {path: float(amax) for path, amax in found.items()} == {path: max(each) for path, each in amaxes.items()}


def test_inputs_that_are_not_finite_have_no_amax():
    plain = decoder()
    with torch.no_grad():
        plain.get_parameter("model.layers.1.input_layernorm.weight")[0] = torch.nan
    with pytest.raises(DataError, match=r"the input of model\.layers\.1\.self_attn\.v_proj has NaN or infinities"):
        input_amaxes(plain, TOKENS)


def test_static_inputs_take_the_folders_scale_or_one_of_amaxes():
    plain, profile = decoder(), get("vllm-tensor")
    with pytest.raises(ConfigError, match="does not measure inputs"):
        model_as(plain, profile)
    amaxes = input_amaxes(plain, TOKENS)
    layer = next(iter(model_as(plain, profile, input_amaxes=amaxes).layers.items()))
    inputs = []
    plain.get_submodule(layer[0]).register_forward_hook(lambda _, given, __: inputs.append(given[0]))
    with torch.no_grad():
        plain(TOKENS)
    assert layer[1].input_amax == inputs[0].abs().max()
    octavo.calibrate(language_model(), [windows()]).apply(plain, hold_weights=True)
    for path, engine in model_as(plain, profile).layers.items():
        assert engine.input_scale is plain.get_submodule(path).input_scale


class _OtherDecoder(torch.nn.Sequential):
    """Of a layout that octavo does not know."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def forward(self, input_ids):
        return super().forward(input_ids)


def test_fused_casts_read_the_norm_before_it_is_rounded():
    plain = decoder()
    fused = replace(get("vllm-token"), fused_cast=True)
    seen = seen_layers(model_as(plain, fused))
    dtypes = {path.rsplit(".", 1)[1]: x.dtype for path, (x, _) in seen.items()}
    assert dtypes["q_proj"] is dtypes["up_proj"] is torch.float32
    assert dtypes["o_proj"] is dtypes["down_proj"] is torch.bfloat16
    x = seen["model.layers.0.self_attn.q_proj"][0]
    assert not torch.equal(x, x.bfloat16().float())
    with pytest.raises(ConfigError, match="fused with a norm"):
        model_as(_OtherDecoder(), fused)


def test_keys_and_values_pass_through_the_profiles_cache():
    profile = replace(profile_of_recipe(ROWS), kv_cache=get("octavo-token").input)
    plain = decoder()
    ours = model_as(plain, profile)(TOKENS)
    octavo.convert(plain, ROWS)

    def round_trip(x):
        return octavo.quantize(x, octavo.E4M3, granularity=PerRow()).dequantize()

    with torch.no_grad():
        expected = logits_of(plain, TOKENS, lambda _, keys, values: (round_trip(keys), round_trip(values)))
        assert torch.equal(ours, expected)
        assert not torch.equal(ours, plain(TOKENS))


def test_mixtures_of_experts():
    plain = Llama(tiny_llama_config(num_experts=4, experts_per_token=2)).eval()
    model = model_as(plain, get("vllm-token"))
    assert sum("experts" in path for path in model.layers) == 2 * 4 * 3
    assert model(TOKENS).isfinite().all()
    with pytest.raises(ConfigError, match="Llama's layout alone"):
        model_as(plain, replace(get("vllm-token"), fused_cast=True))


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    from tests.tiny_llama import tiny_hugging_face_config

    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(tiny_hugging_face_config()).eval()
    ours = Llama(tiny_llama_config(rope_theta=10000.0, rms_norm_eps=theirs.config.rms_norm_eps)).eval()
    ours.load_state_dict(theirs.state_dict())
    profile = get("octavo-token")
    first, second = model_as(theirs, profile)(TOKENS), model_as(ours, profile)(TOKENS)
    assert (first - second).norm() < 0.02 * second.norm()
    assert all(isinstance(theirs.get_submodule(p), torch.nn.Linear) for p in model_as(theirs, profile).layers)
    assert isinstance(model_as(theirs, profile).layers["model.layers.1.mlp.up_proj"], EngineLinear)


@pytest.mark.parametrize(
    "other",
    [
        torch.nn.Linear(8, 8),
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)),
        torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)),
        "a folder",
        None,
    ],
    ids=["a layer", "layers", "layers and an embedding", "text", "nothing"],
)
def test_what_is_no_decoder_is_refused(other):
    says = f"a model is octavo's Llama or a decoder of transformers, .*, not a {type(other).__name__}; load one with"
    for call in (
        lambda: EngineCopies(other),
        lambda: model_as(other, "vllm-token"),
        lambda: input_amaxes(other, TOKENS),
        lambda: agree(other, "vllm-token", "te-block", TOKENS),
        lambda: agree(other, "vllm-tensor", "te-block", TOKENS),
        lambda: agree_with_itself(other, "vllm-token", TOKENS),
    ):
        with pytest.raises(ConfigError, match=says):
            call()


def test_a_decoder_may_be_a_language_model():
    loaded, plain = language_model(), decoder()
    assert torch.equal(model_as(loaded, "vllm-token")(TOKENS), model_as(plain, "vllm-token")(TOKENS))
    assert input_amaxes(loaded, TOKENS) == input_amaxes(plain, TOKENS)


def test_an_engine_may_be_its_name():
    plain = decoder()
    expected = model_as(plain, get("vllm-token"))(TOKENS)
    assert torch.equal(model_as(plain, "vllm-token")(TOKENS), expected)
    assert torch.equal(EngineCopies(plain).of("vllm-token")(TOKENS), expected)
    with pytest.raises(ConfigError, match="there is no engine 'vllm'"):
        model_as(plain, "vllm")


def test_a_decoder_without_a_head_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    headless = transformers.LlamaModel(config)
    says = "LlamaModel gives no logits of each token; load a model as transformers.AutoModelForCausalLM does"
    for call in (lambda: agree(headless, "vllm-token", "te-block", TOKENS), lambda: input_amaxes(headless, TOKENS)):
        with pytest.raises(ConfigError, match=says):
            call()
