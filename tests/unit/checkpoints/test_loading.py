import json
import random
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from octavo.checkpoints import load_quantized
from octavo.checksums import SUMS
from octavo.errors import CheckpointError, ConfigError
from octavo.export.checkpoint_writer import DTYPES, save_quantized
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import Llama
from octavo.nn import Linear
from tests.unit.checkpoints.folders import (
    DYNAMIC,
    LAYER,
    ROW,
    change_config,
    change_tensors,
    dynamic,
    layer_of,
    static,
    written,
)
from tests.unit.quantization.tiny_models import LINEARS, windows

KINDS = [*DYNAMIC, "static", "modelopt"]
SCALE = {"blocks": "weight_scale_inv"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each kind once; tests that break one copy it first."""
    root = tmp_path_factory.mktemp("folders")
    for kind in KINDS:
        written(root / kind, kind)
    return root


@pytest.fixture
def broken(folders, tmp_path):
    """A copy to break; without checksums, which would see it first, as another tool writes it."""

    def copy(kind):
        shutil.copytree(folders / kind, tmp_path / kind, ignore=shutil.ignore_patterns(SUMS))
        return tmp_path / kind

    return copy


def as_language_model(folder):
    read = load_quantized(folder)
    return read, LanguageModel(model=read.model, tokenizer=read.tokenizer, context=read.context, source=str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_come_back_byte_for_byte(folders, kind):
    model = written(folders.parent / f"again {kind}", kind)
    read = load_quantized(folders / kind)
    assert len(read.recipes) == LINEARS
    for path in read.recipes:
        ours, theirs = layer_of(model.model, path), layer_of(read.model, path)
        codes = load_file(folders / kind / "model.safetensors")[f"{path}.weight"]
        assert torch.equal(theirs.weight_codes.view(torch.uint8), codes.view(torch.uint8))
        scales = [each.input_scale for each in (ours, theirs) if each.recipe.has_static_input]
        assert len(scales) == (0 if kind in DYNAMIC else 2)
        assert not scales or torch.equal(*scales)


@pytest.mark.parametrize("kind", KINDS)
def test_written_again_the_folder_is_the_same_to_the_byte(folders, tmp_path, kind):
    read, model = as_language_model(folders / kind)
    save_quantized(model, tmp_path / "again", format=read.format, kv_scales=read.kv_scales, verify_folder=False)
    for path in (folders / kind).iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_by_hand_the_weights_are_those_that_the_model_multiplies_by(folders, kind):
    """Against numpy and ml_dtypes, which know nothing of octavo."""
    read = load_quantized(folders / kind)
    name = SCALE.get(kind, "weight_scale")
    with safe_open(folders / kind / "model.safetensors", framework="np") as file:
        scale = file.get_tensor(f"{LAYER}.{name}")
    codes = load_file(folders / kind / "model.safetensors")[f"{LAYER}.weight"]
    values = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if scale.dtype == np.uint8:  # E8M0, 32 of K each
        scale = np.exp2(scale.astype(np.float32) - 127).repeat(32, 1)[:, : values.shape[1]]
    expected = values * scale  # one for all, a column, or one 128x128 block, which is larger than the weight
    layer = layer_of(read.model, LAYER)
    held = layer.stored_codes()
    assert held is not None
    np.testing.assert_array_equal(held.dequantize().numpy(), expected)


def test_powers_of_two_stay_powers_of_two(tmp_path):
    model, _ = static("row", power_of_two=True)
    save_quantized(model, tmp_path / "m", verify_folder=False)
    for path, layer in load_quantized(tmp_path / "m").model.named_modules():
        if isinstance(layer, Linear):
            assert torch.equal(layer.weight_scale.frexp().mantissa, torch.full_like(layer.weight_scale, 0.5)), path
            assert layer.input_scale.frexp().mantissa == 0.5


def test_logits_are_those_of_the_emulation(folders):
    read, model = as_language_model(folders / "rows")
    ours = dynamic(ROW)
    with torch.no_grad():
        for tensor in (
            p for name, p in ours.model.named_parameters() if name.split(".")[-2].endswith(("norm", "tokens"))
        ):
            tensor.copy_(tensor.bfloat16())
        assert torch.equal(model.logits(windows()), ours.logits(windows()))
    assert read.model.get_parameter("lm_head.weight") is read.model.get_parameter("model.embed_tokens.weight")


def test_load_language_model_knows_the_folders(folders):
    loaded = load_language_model(folders / "rows")
    assert isinstance(loaded.model, Llama)
    assert loaded.model.get_submodule(LAYER).codes_layout is not None
    assert loaded.context == 64


def test_kv_scales(folders):
    read = load_quantized(folders / "modelopt")
    assert set(read.kv_scales) == {0, 1}
    assert "model.layers.1.self_attn.v_proj.v_scale" in load_file(folders / "modelopt" / "model.safetensors")
    assert "model.layers.1.self_attn.v_scale" in load_file(folders / "static" / "model.safetensors")


@pytest.mark.parametrize(("kind", "before"), [("static", ""), ("modelopt", "{}_proj.")])
def test_keys_and_values_have_their_own_scales(folders, kind, before):
    """By the names of the format, which are spelt out here."""
    _, scales = static(kv_cache=True)
    tensors, read = load_file(folders / kind / "model.safetensors"), load_quantized(folders / kind)
    for index, pair in scales.items():
        assert pair[0] != pair[1]
        for name, scale, ours in zip("kv", pair, read.kv_scales[index], strict=True):
            found = tensors[f"model.layers.{index}.self_attn.{before.format(name)}{name}_scale"]
            assert found.item() == scale.item() == ours.item()


def swap(tensors, one, other):
    tensors[one], tensors[other] = tensors[other], tensors[one]


FAULTS = {
    "a missing scale": (lambda t: t.pop(f"{LAYER}.weight_scale"), f"no {LAYER}.weight_scale"),
    "a missing weight": (lambda t: t.pop(f"{LAYER}.weight"), "is missing"),
    "a missing norm": (lambda t: t.pop("model.norm.weight"), "no model.norm.weight"),
    "a NaN scale": (lambda t: t[f"{LAYER}.weight_scale"].fill_(float("nan")), "holds nan"),
    "a NaN code": (lambda t: t[f"{LAYER}.weight"].view(torch.uint8)[0, 0].fill_(0x7F), "holds NaN"),
    "scales of another shape": (
        lambda t: swap(t, f"{LAYER}.weight_scale", "model.layers.0.mlp.up_proj.weight_scale"),
        "weight_scale is ",
    ),
    "scales under each other's name": (
        lambda t: swap(t, f"{LAYER}.weight_scale", f"{LAYER}.weight"),
        "FP8|codes",
    ),
    "an unknown scale": (lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(1)}), "neither the model's nor"),
    "an unknown zero point": (lambda t: t.update({f"{LAYER}.zero_point": torch.ones(1)}), "neither the model's nor"),
    "a weight of another shape": (
        lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"][:-1].clone()}),
        r"is \[63, 64\] in the folder",
    ),
    "a norm of another shape": (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"is \[3\] in the folder"),
    "a weight that is no codes": (
        lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].bfloat16()}),
        "is not FP8 codes",
    ),
    "codes where none belong": (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
        "FP8 codes of no linear layer",
    ),
    "codes of another format": (
        lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].float().to(torch.float8_e5m2)}),
        "its recipe has E4M3",
    ),
}


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
NUMBERS = {
    "a norm of integers": (lambda t: t.update({NORM: t[NORM].to(torch.int8)}), "rows", f"{NORM} is torch.int8"),
    "a norm that is NaN": (lambda t: t[NORM][3].fill_(float("nan")), "rows", f"{NORM} holds NaN"),
    "an embedding without end": (lambda t: t[EMBEDDING][3].fill_(float("inf")), "rows", f"{EMBEDDING} holds NaN or"),
    "an embedding that does not fit": (
        lambda t: t.update({EMBEDDING: t[EMBEDDING].double()}),
        "rows",
        f"{EMBEDDING} is torch.float64",
    ),
    "a tied head of its own": (
        lambda t: t.update({"lm_head.weight": t[EMBEDDING] * 2}),
        "rows",
        f"lm_head.weight and {EMBEDDING} are tied",
    ),
    "a scale byte that is NaN": (lambda t: t[f"{LAYER}.weight_scale"][0].fill_(255), "own groups", "holds 255"),
    "bytes as scales": (
        lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"].to(torch.uint8)}),
        "rows",
        r"weight_scale is torch\.uint8",
    ),
}


@pytest.mark.parametrize("fault", NUMBERS)
def test_numbers_that_a_model_cannot_have(broken, fault):
    change, kind, match = NUMBERS[fault]
    folder = broken(kind)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=match):
        load_quantized(folder)


def test_a_tied_head_may_be_in_the_file_as_well(broken, folders):
    folder = broken("rows")
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    ours, theirs = (load_quantized(each).model.state_dict() for each in (folder, folders / "rows"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_tensors(broken, fault):
    change, match = FAULTS[fault]
    folder = broken("rows")
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=match):
        load_quantized(folder)


def test_input_and_weight_scales_swapped_are_found_by_shape(tmp_path):
    model, _ = static("row")
    save_quantized(model, tmp_path / "m", verify_folder=False)
    change_tensors(tmp_path / "m", lambda t: swap(t, f"{LAYER}.input_scale", f"{LAYER}.weight_scale"))
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight_scale is \[1\]"):
        load_quantized(tmp_path / "m")


def test_a_missing_input_scale(broken):
    folder = broken("static")
    change_tensors(folder, lambda t: t.pop(f"{LAYER}.input_scale"))
    with pytest.raises(CheckpointError, match=f"no {LAYER}.input_scale"):
        load_quantized(folder)


CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown method": ("rows", {"quant_method": "gptq"}, "'gptq' as quant_method; octavo reads"),
    "integers": ("rows", {"format": "int-quantized"}, "'int-quantized' as format"),
    "no groups": ("rows", {"config_groups": None}, "config_groups"),
    "a dynamic cache": ("static", {"kv_cache_scheme": {"dynamic": True}}, "kv_cache_scheme"),
    "a cache of integers": ("static", {"kv_cache_scheme": CACHE | {"type": "int"}}, "kv_cache_scheme"),
    "a cache of integers by default": (
        "static",
        {"kv_cache_scheme": {key: value for key, value in CACHE.items() if key != "type"}},
        "kv_cache_scheme",
    ),
    "a cache of four bits": ("static", {"kv_cache_scheme": CACHE | {"num_bits": 4}}, "kv_cache_scheme"),
    "an asymmetric cache": ("static", {"kv_cache_scheme": CACHE | {"symmetric": False}}, "kv_cache_scheme"),
    "a cache that is a number": ("static", {"kv_cache_scheme": 5}, "5 as kv_cache_scheme"),
    "ModelOpt's cache of integers": ("modelopt", {"kv_cache_scheme": CACHE | {"type": "int"}}, "kv_cache_scheme"),
    "ModelOpt's cache that is a number": ("modelopt", {"kv_cache_scheme": 5}, "5 as kv_cache_scheme"),
    "a method that is a list": ("rows", {"quant_method": []}, r"\[\] as quant_method"),
    "a number to ignore": ("rows", {"ignore": 5}, "5 as ignore"),
    "numbers to ignore": ("rows", {"ignore": [5]}, r"\[5\] as ignore"),
    "half an expression": ("rows", {"ignore": ["re:["]}, r"'re:\[' as ignore"),
    "ModelOpt's number to ignore": ("modelopt", {"ignore": 5}, "5 as ignore"),
    "a number not to convert": ("blocks", {"modules_to_not_convert": 5}, "5 as modules_to_not_convert"),
    "a number of layers": ("own rows", {"recipes": {"recipe-1.toml": 5}}, "5 as layers of recipe-1.toml"),
    "sparse weights": (
        "rows",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "'sparse-24-bitmask' as the format",
    ),
    "sparsity without a format": ("rows", {"sparsity_config": {"global_sparsity": 0.5}}, "None as the format"),
    "a sparsity that is a word": ("rows", {"sparsity_config": "dense"}, "'dense' as the format"),
    "transformed weights": ("rows", {"transform_config": {"config_groups": {}}}, "as transform_config"),
    "codes that the configuration leaves out": ("rows", {"ignore": [LAYER, "lm_head"]}, "a layer in high precision"),
    "layers that are no codes": ("rows", {"ignore": []}, "lm_head.weight.* is missing|lm_head.weight.* is no FP8"),
    "other blocks": ("blocks", {"weight_block_size": [64, 64]}, "weight_block_size"),
    "static blocks": ("blocks", {"activation_scheme": "static"}, "activation_scheme"),
    "E8M0 scales": ("blocks", {"scale_fmt": "ue8m0"}, "scale_fmt"),
    "NVFP4": ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo"),
    "another version": ("own rows", {"version": 2}, "version"),
    "no recipes": ("own rows", {"recipes": {}}, "recipes"),
    "a layer that is not there": ("own rows", {"recipes": {"recipe-1.toml": ["model.x"]}}, "'model.x'"),
    "a recipe that is not there": ("own rows", {"recipes": {"recipe-9.toml": [LAYER]}}, "is not a recipe"),
}


@pytest.mark.parametrize("fault", CONFIGURATIONS)
def test_configurations_that_are_not_read(broken, fault):
    kind, change, match = CONFIGURATIONS[fault]
    folder = broken(kind)
    change_config(folder, lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=match):
        load_quantized(folder)


GROUPS: dict[str, tuple[str, dict[str, Any], str]] = {
    "integer weights": ("weights", {"type": "int"}, "symmetric E4M3"),
    "four bits": ("weights", {"num_bits": 4}, "symmetric E4M3"),
    "groups of weights": ("weights", {"strategy": "group"}, "strategies"),
    "asymmetric inputs": ("input_activations", {"symmetric": False}, "symmetric E4M3"),
    "other inputs": ("input_activations", {"strategy": "attn_head"}, "input_activations"),
}


@pytest.mark.parametrize("targets", [5, [5], ["re:["]])
def test_invalid_targets_are_refused(broken, targets):
    folder = broken("rows")
    change_config(folder, lambda config: config["config_groups"]["group_0"].update(targets=targets))
    with pytest.raises(CheckpointError, match="as targets"):
        load_quantized(folder)


@pytest.mark.parametrize("fault", GROUPS)
def test_groups_that_are_not_read(broken, fault):
    role, change, match = GROUPS[fault]
    folder = broken("rows")
    change_config(folder, lambda config: config["config_groups"]["group_0"][role].update(change))
    with pytest.raises(CheckpointError, match=match):
        load_quantized(folder)


def test_targets_and_what_is_ignored_may_be_expressions(broken, folders):
    folder = broken("rows")

    def change(config):
        config["ignore"] = ["re:.*lm_head"]
        config["config_groups"]["group_0"]["targets"] = [r"re:.*self_attn\..*_proj$", "re:.*mlp.*"]

    change_config(folder, change)
    assert load_quantized(folder).recipes == load_quantized(folders / "rows").recipes


DENSE = {"format": "dense", "global_sparsity": 0.1, "registry_requires_subclass": False}


@pytest.mark.parametrize("sparsity", [DENSE, {}, None], ids=str)
def test_configuration_of_dense_weights_is_accepted(broken, folders, sparsity):
    folder = broken("rows")
    change_config(folder, lambda config: config.update(sparsity_config=sparsity, transform_config={}))
    assert load_quantized(folder).recipes == load_quantized(folders / "rows").recipes


@pytest.mark.parametrize("kind", ["blocks", "rows", "modelopt"])
def test_experts_are_refused_by_name(broken, kind):
    """As DeepSeek names them, in a layer that its configuration says has none."""
    folder, expert = broken(kind), "model.layers.3.mlp.experts.{}.gate_proj"

    def change(tensors):
        for index in range(2):
            tensors[f"{expert.format(index)}.weight"] = torch.zeros(128, 128).to(torch.float8_e4m3fn)
            tensors[f"{expert.format(index)}.weight_scale_inv"] = torch.ones(1, 1)

    change_tensors(folder, change)
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(record | {"model_type": "deepseek_v3"}))
    words = rf"has experts one by one, {expert.format(0)}\.weight and 3 more tensors, which this Deep.* has not"
    with pytest.raises(CheckpointError, match=words):
        load_quantized(folder)


def test_shared_experts_are_layers(broken):
    folder = broken("rows")
    change_tensors(folder, lambda t: t.update({"model.layers.0.mlp.shared_experts.up_proj.weight": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="neither the model's nor"):
        load_quantized(folder)


def test_deepseeks_own_configuration_leaves_the_head_out_without_saying_so(broken, folders):
    folder = broken("blocks")
    change_config(folder, lambda config: config.pop("modules_to_not_convert"))
    assert load_quantized(folder).recipes == load_quantized(folders / "blocks").recipes


def test_modelopt_folder_without_quantization_config_is_recognized(broken):
    folder = broken("modelopt")
    record = json.loads((folder / "config.json").read_text())
    del record["quantization_config"]
    (folder / "config.json").write_text(json.dumps(record))
    assert load_quantized(folder).format == "modelopt"


@pytest.mark.parametrize("algorithm", ["NVFP4", "INT8", 8])
def test_unsupported_modelopt_cache_format_is_refused_without_quantization_config(broken, algorithm):
    folder = broken("modelopt")
    record = json.loads((folder / "config.json").read_text())
    del record["quantization_config"]
    (folder / "config.json").write_text(json.dumps(record))
    said = json.loads((folder / "hf_quant_config.json").read_text())
    said["quantization"]["kv_cache_quant_algo"] = algorithm
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=f"{algorithm!r} as kv_cache_scheme"):
        load_quantized(folder)


@pytest.mark.parametrize(
    "change",
    [{"rope_parameters": 5}, {"intermediate_size": True}, {"num_hidden_layers": "two"}, {"tie_word_embeddings": 3}],
    ids=str,
)
def test_impossible_model_shape_is_refused(broken, change):
    folder = broken("rows")
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(record | change))
    with pytest.raises(CheckpointError, match=r"rope_parameters|cannot build"):
        load_quantized(folder)


def test_a_truncated_file(broken):
    folder = broken("rows")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_quantized(folder)


def test_no_model(tmp_path, broken):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_quantized(tmp_path)
    folder = broken("rows")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_quantized(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="a list where a JSON object belongs"):
        load_quantized(folder)


def test_a_plain_folder_is_not_read(broken):
    folder = broken("rows")
    record = json.loads((folder / "config.json").read_text())
    del record["quantization_config"]
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="not in FP8"):
        load_quantized(folder)


def test_transformers_is_asked_for_other_architectures(broken, monkeypatch):
    folder = broken("rows")
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(record | {"model_type": "granite"}))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match="which needs transformers"):
        load_quantized(folder)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_written_again_nothing_is_narrowed(tmp_path, dtype):
    """One tensor in FP32, and the folder is as wide as that."""
    save_quantized(dynamic(ROW), tmp_path / "m", dtype=dtype, verify_folder=False)
    assert load_quantized(tmp_path / "m").dtype == DTYPES[dtype]
    change_tensors(tmp_path / "m", lambda tensors: tensors.update({NORM: tensors[NORM].float()}))
    assert load_quantized(tmp_path / "m").dtype == torch.float32


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_of_an_exported_folder_is_refused(folders, tmp_path, kind):
    """Of codes too, of which each is a number like any other."""
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    file = folder / "model.safetensors"
    for bit in random.Random(0).sample(range(8 * file.stat().st_size), 60):
        flip(file, bit)
        with pytest.raises(CheckpointError, match=rf"{file}' is damaged or was edited"):
            load_quantized(folder)
        flip(file, bit)
    load_quantized(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_edited_file_beside_the_weights_is_refused_while_its_checksum_stands(folders, tmp_path, name):
    folder = shutil.copytree(folders / KINDS[0], tmp_path / "m")
    (folder / name).write_text((folder / name).read_text() + "\n")
    with pytest.raises(CheckpointError, match=rf"{name}' is damaged or was edited.*remove octavo.sha256"):
        load_language_model(folder)
    (folder / SUMS).unlink()
    load_language_model(folder)
