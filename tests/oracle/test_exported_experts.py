"""Experts in checkpoints: transformers reads what octavo writes, and octavo reads it back to the bit."""

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import octavo
from octavo.checkpoints import FORMATS, contents_of, load_quantized
from octavo.convert import file_names, unfuse_experts
from octavo.errors import ConfigError
from octavo.export.checkpoint_writer import save_quantized
from octavo.export.emulation import emulated
from octavo.export.lockstep import relative_error
from octavo.nn import Linear
from tests.tiny_mixtures import EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY, mixture
from tests.unit.checkpoints.folders import verdict

pytestmark = pytest.mark.skipif(
    find_spec("compressed_tensors") is None or find_spec("transformers") is None,
    reason="compressed-tensors or transformers is not installed",
)
LEAVES = {
    "Mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3Moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "Phimoe": ("block_sparse_moe", "w1", "w3", "w2"),
}
# Layers with inputs [tokens, K] or [B, 1, tokens, K], of which compressed-tensors casts several tokens by one scale.
FLAT = {
    "Qwen2Moe": "'model.layers.0.mlp.shared_expert.gate_proj' and 5 more",
    "Ernie4_5_Moe": "'model.layers.1.mlp.shared_experts.gate_proj' and 2 more",
    "DeepseekV3": "'model.layers.0.self_attn.kv_b_proj' and 1 more",
    "Phimoe": "",
}
each_model = pytest.mark.parametrize("name", LEAVES)
TOKENS = torch.arange(24).view(1, 24)


def converted(name, recipe="rowwise", **options):
    model = mixture(name)
    unfuse_experts(model.model)
    octavo.convert(model.model, recipe, **options)
    return model


def decoded(tensors, name, scale="weight_scale"):
    return tensors[f"{name}.weight"].float() * tensors[f"{name}.{scale}"]


@each_model
def test_transformers_decodes_every_expert_to_the_right_place(name, tmp_path):
    from transformers import AutoModelForCausalLM

    save_quantized(converted(name), tmp_path / "m", verify_folder=False)
    tensors, (block, gate, up, down) = load_file(tmp_path / "m" / "model.safetensors"), LEAVES[name]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    for index in range(2):
        experts: Any = read.get_submodule(f"model.layers.{index}.mlp.experts")
        for expert in range(EXPERTS):
            path = f"model.layers.{index}.{block}.experts.{expert}"
            assert tensors[f"{path}.{gate}.weight"].dtype == torch.float8_e4m3fn
            assert torch.equal(experts.gate_up_proj[expert, :INTERMEDIATE], decoded(tensors, f"{path}.{gate}"))
            assert torch.equal(experts.gate_up_proj[expert, INTERMEDIATE:], decoded(tensors, f"{path}.{up}"))
            assert torch.equal(experts.down_proj[expert], decoded(tensors, f"{path}.{down}"))
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{index}.{block}.gate" for index in (0, 1)]
    modules = [f"model.layers.{index}.mlp.{'router' if name == 'Phimoe' else 'gate'}" for index in (0, 1)]
    assert set(config["ignore"]) == {"lm_head", *routers, *modules}  # named for servers, and for transformers
    assert len(config["ignore"]) == (3 if routers == modules else 5)
    assert not any(hasattr(read.get_submodule(path), "quantization_scheme") for path in modules)
    assert all(tensors[f"{path}.weight"].dtype == torch.bfloat16 for path in routers)


@pytest.mark.long
def test_an_export_is_verified_by_transformers_and_by_octavo(tmp_path, monkeypatch):
    from octavo.export import checkpoint_writer, verification

    readers = []

    def noted(folder, probe, *, reader, scratch):
        experts = sorted(path for path in probe.inputs if ".experts." in path)
        readers.append((reader, bool(experts)))
        return verification.verify(folder, probe, reader=reader, scratch=scratch)

    monkeypatch.setattr(checkpoint_writer, "verify", noted)
    saved = save_quantized(converted("Mixtral"), tmp_path / "m")
    assert readers == [("transformers", False), ("octavo", True)]
    assert saved.reader == "transformers"
    assert verdict(saved).logits_error < 1e-5
    assert verdict(saved).worst_error < 1e-5
    assert verdict(saved).greedy_equal == verdict(saved).greedy_tokens == 32
    assert saved.schemes == {"weights with a scale a row, inputs with a scale a token": 2 * (4 + 3 * EXPERTS)}
    assert any("transformers decodes the weights of experts" in note for note in saved.notes)


@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("name", ["Qwen2Moe", *(pytest.param(name, marks=pytest.mark.long) for name in list(FLAT)[1:])])
def test_layers_whose_input_is_not_batch_by_tokens_are_verified_token_by_token(name, tmp_path):
    saved = save_quantized(converted(name), tmp_path / "m")
    assert saved.reader == "transformers"
    assert verdict(saved).logits_error < 1e-5
    assert verdict(saved).worst_error < 1e-5
    assert verdict(saved).greedy_equal == verdict(saved).greedy_tokens == 32
    notes = [note for note in saved.notes if note.startswith("compressed-tensors casts several tokens by one scale")]
    assert [FLAT[name] in note for note in notes] == [True] * bool(FLAT[name])


def test_transformers_reads_a_scale_a_token_there_with_octavos_quantizer_only(tmp_path):
    from transformers import AutoModelForCausalLM

    from octavo.compat.huggingface import codes_config

    save_quantized(converted("Qwen2Moe", skip=["*.experts.*"]), tmp_path / "m", verify_folder=False)
    layer = "model.layers.0.mlp.shared_expert.gate_proj"
    x = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 25.0)[:, None]
    expected = load_quantized(tmp_path / "m").model.get_submodule(layer)(x)
    read = {
        "octavo": AutoModelForCausalLM.from_pretrained(
            tmp_path / "m", config=codes_config(tmp_path / "m"), dtype=torch.float32
        ),
        "transformers": AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32),
    }
    read["transformers"](TOKENS)  # decodes the weights
    assert torch.equal(read["octavo"].get_submodule(layer)(x), expected)
    theirs = read["transformers"].get_submodule(layer)
    assert relative_error(theirs(x), expected) > 0.005
    assert relative_error(theirs(x[None])[0], expected) < 1e-5


@each_model
@pytest.mark.parametrize(
    ("fmt", "recipe"),
    [("compressed-tensors", "rowwise"), ("hf-fp8", "blockwise"), ("octavo", "tensorwise"), ("modelopt", "static")],
)
def test_octavo_reads_codes_and_scales_back_to_the_bit(name, fmt, recipe, tmp_path):
    model = converted(name, recipe)
    if recipe == "static":
        for number, layer in enumerate(each for each in model.model.modules() if isinstance(each, Linear)):
            layer.input_scale.fill_(0.01 + number / 1000)
    save_quantized(model, tmp_path / "m", format=fmt, verify_folder=False, dtype="fp32")
    read = load_quantized(tmp_path / "m").model
    layers = {path: layer for path, layer in model.model.named_modules() if isinstance(layer, Linear)}
    assert len(layers) == 2 * (4 + 3 * EXPERTS)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    names = file_names(model.model)
    for path, layer in layers.items():
        stored: Any = read.get_submodule(path)
        codes = stored.stored_codes()
        assert torch.equal(codes.data.view(torch.uint8), tensors[f"{names.path(path)}.weight"].view(torch.uint8))
        if layer.recipe.has_static_input:
            assert torch.equal(stored.input_scale, layer.input_scale)
    with emulated(model, contents_of(model.model), dtype=torch.float32, served=FORMATS[fmt].served) as logits:
        expected = logits(TOKENS)
    assert expected.shape == (1, 24, VOCABULARY)
    assert torch.equal(read(TOKENS).logits, expected)


def test_transformers_decodes_deepseeks_format_too(tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model = converted("Qwen3Moe", "blockwise")
    save_quantized(model, tmp_path / "m", format="hf-fp8", verify_folder=False, dtype="fp32")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    experts: Any = read.get_submodule("model.layers.1.mlp.experts")
    for expert in range(EXPERTS):
        path = f"model.layers.1.mlp.experts.{expert}"
        gate, up, down = (
            decoded(tensors, f"{path}.{leaf}", "weight_scale_inv") for leaf in ("gate_proj", "up_proj", "down_proj")
        )
        assert torch.equal(experts.gate_up_proj[expert], torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[expert], down)


def test_experts_of_several_schemes_are_refused(tmp_path):
    words = (
        r"one scheme, and 'model\.layers\.0\.mlp\.experts' has several; skip all or none of it, or use the format "
        "octavo; octavo sensitivity makes a mix that servers run if it is given the --format of the export"
    )
    for options in ({"skip": ["*.0.mlp.experts.1.*"]}, {"overrides": {"*.0.mlp.experts.1.w1": "tensorwise"}}):
        with pytest.raises(ConfigError, match=words):
            save_quantized(converted("Mixtral", **options), tmp_path / "m", verify_folder=False)


def test_experts_in_high_precision_are_written_one_by_one(tmp_path):
    from transformers import AutoModelForCausalLM

    model = converted("Mixtral", skip=["*.experts.*"])
    saved = save_quantized(model, tmp_path / "m", verify_folder=False, dtype="fp32")
    assert "model.layers.1.mlp.experts.3.w2" in saved.left_out
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.block_sparse_moe.experts.3.w2" in config["ignore"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    weight = model.model.get_parameter("model.layers.1.mlp.experts.3.w2.weight")
    experts: Any = read.get_submodule("model.layers.1.mlp.experts")
    assert torch.equal(experts.down_proj[3], weight)
