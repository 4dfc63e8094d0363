import errno
import json
import os
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import octavo
from octavo.checkpoints import FORMATS, load_quantized
from octavo.errors import CheckpointError, ConfigError
from octavo.export import checkpoint_writer, verification
from octavo.export.checkpoint_writer import save_quantized
from octavo.export.emulation import layers_in_high_precision
from tests.unit.checkpoints.folders import LAYER, ROW, change_tensors, dynamic, static, verdict
from tests.unit.quantization.tiny_models import LINEARS, language_model


@pytest.mark.long
def test_a_folder_is_verified_by_another_process(tmp_path):
    """By octavo, whatever else is installed; transformers has tests/oracle/test_compressed_tensors.py."""
    model, scales = static(kv_cache=True)
    phases = []
    saved = save_quantized(
        model, tmp_path / "m", format="modelopt", kv_scales=scales, on_phase=lambda *each: phases.append(each)
    )
    assert saved.reader == "octavo"
    assert verdict(saved).logits_error < 1e-6
    assert verdict(saved).free_error < 1e-3
    assert verdict(saved).greedy_equal == verdict(saved).greedy_tokens == 32
    assert saved.schemes == {"weights with a scale a tensor, inputs with one scale from calibration": LINEARS}
    assert saved.left_out == ("lm_head",)
    assert [note[:43] for note in saved.notes] == ["keys and values of 2 layers have scales; a "]
    assert {label for label, *_ in phases} == {"write", "emulate", "read back"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_what_reads_back_otherwise_is_removed(tmp_path, monkeypatch):
    verified = verification.verify

    def spoiled(folder, probe, **how):
        change_tensors(folder, lambda tensors: tensors[f"{LAYER}.weight_scale"].mul_(1.25))
        return verified(folder, probe, **how)

    monkeypatch.setattr(checkpoint_writer, "verify", spoiled)
    monkeypatch.setattr(checkpoint_writer, "reader_of", lambda *_: "octavo")
    with pytest.raises(CheckpointError, match=r"gives other results when octavo reads it and was removed.*o_proj"):
        save_quantized(dynamic(ROW), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_what_cannot_be_read_back_is_removed(tmp_path, monkeypatch):
    verified = verification.verify

    def spoiled(folder, probe, **how):
        (folder / "model.safetensors").write_bytes(b"nothing")
        return verified(folder, probe, **how)

    monkeypatch.setattr(checkpoint_writer, "verify", spoiled)
    monkeypatch.setattr(checkpoint_writer, "reader_of", lambda *_: "octavo")
    with pytest.raises(CheckpointError, match=r"cannot be read back by octavo and was removed.*model\.safetensors"):
        save_quantized(dynamic(ROW), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("missing", ["transformers", "compressed_tensors"])
def test_a_folder_that_only_octavo_read_back_says_so(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(verification, "find_spec", lambda name: None if name == missing else find_spec(name))
    saved = save_quantized(dynamic(ROW), tmp_path / "m")
    assert saved.reader == "octavo"
    assert saved.notes[-1].startswith("read back by octavo alone")
    assert save_quantized(dynamic(ROW), tmp_path / "o", format="octavo").notes == ()
    assert not any("alone" in note for note in save_quantized(dynamic(ROW), tmp_path / "n", verify_folder=False).notes)


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_the_model_is_left_as_it_was(tmp_path):
    model = dynamic("rowwise")
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    recipe = model.model.get_submodule(LAYER).recipe
    saved = save_quantized(model, tmp_path / "m", format="octavo")
    assert saved.schemes == {"rowwise": LINEARS}
    assert model.model.get_submodule(LAYER).recipe is recipe
    assert all(torch.equal(before[name], tensor) for name, tensor in model.model.state_dict().items())


def test_notes_say_what_is_served_otherwise(tmp_path):
    saved = save_quantized(dynamic("tensorwise"), tmp_path / "m", verify_folder=False)
    assert "casts inputs in a way that compressed-tensors cannot describe" in saved.notes[0]
    assert saved.agreement is None


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ({"*.1.self_attn.q_proj": "bf16"}, "model.layers.1.self_attn"),
        ({"*.up_proj": "bf16"}, "model.layers.0.mlp"),
        ({"*.1.self_attn.?_proj": "bf16", "*.down_proj": "bf16"}, None),
    ],
)
def test_a_note_says_which_merged_layers_have_several_schemes(tmp_path, overrides, refused):
    model = language_model()
    octavo.convert(model.model, ROW, overrides=overrides)
    notes = save_quantized(model, tmp_path / "m", verify_folder=False).notes
    said = [note for note in notes if note.startswith("vLLM and SGLang refuse this folder")]
    assert len(said) == (refused is not None)
    assert all(f"in {refused!r}" in note for note in said)
    assert not save_quantized(model, tmp_path / "o", format="octavo", verify_folder=False).notes


def test_bytes(tmp_path):
    saved = save_quantized(dynamic(ROW), tmp_path / "m", verify_folder=False)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < saved.nbytes - held < 10_000  # names and shapes
    plain = language_model()
    assert saved.bf16_nbytes == 2 * sum(parameter.numel() for parameter in plain.model.parameters())
    assert {str(tensor.dtype) for name, tensor in tensors.items() if name.endswith("_scale")} == {"torch.float32"}
    assert tensors["model.norm.weight"].dtype == torch.bfloat16


def test_shards(tmp_path):
    save_quantized(dynamic(ROW), tmp_path / "m", max_shard_bytes=40_000, verify_folder=False)
    assert len(list((tmp_path / "m").glob("model-*-of-*.safetensors"))) > 2
    assert len(load_quantized(tmp_path / "m").recipes) == LINEARS


def test_a_mix_of_recipes(tmp_path):
    model = language_model()
    octavo.convert(model.model, "rowwise", overrides={"*.down_proj": "weight_only"}, skip=["*.0.mlp.up_proj"])
    save_quantized(model, tmp_path / "ct", verify_folder=False)
    config = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["model.layers.0.mlp.up_proj", "lm_head"]
    assert config["config_groups"]["group_1"]["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert config["config_groups"]["group_1"]["input_activations"] is None
    read = load_quantized(tmp_path / "ct")
    assert read.recipes["model.layers.0.mlp.down_proj"].output.a is None
    assert read.recipes[LAYER].output.a is not None
    assert "model.layers.0.mlp.up_proj" not in read.recipes


REFUSED = {
    "hf-fp8": ("rowwise", "it has weights with a scale a row"),
    "modelopt": ("rowwise", "it has weights with a scale a row"),
    "compressed-tensors": ("blockwise", "not a multiple of 128"),
}


@pytest.mark.parametrize("fmt", REFUSED)
def test_what_a_format_cannot_say(tmp_path, fmt):
    recipe, match = REFUSED[fmt]
    with pytest.raises(ConfigError, match=match):
        save_quantized(dynamic(recipe), tmp_path / "m", format=fmt)
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(tmp_path):
    with pytest.raises(ConfigError, match="no layer of this model is in FP8"):
        save_quantized(language_model(), tmp_path / "m")
    with pytest.raises(ConfigError, match="training steps"):
        save_quantized(dynamic("delayed"), tmp_path / "m", format="octavo")
    with pytest.raises(ConfigError, match="format must be one of"):
        save_quantized(dynamic(ROW), tmp_path / "m", format="gguf")
    with pytest.raises(ConfigError, match="max_shard_bytes"):
        save_quantized(dynamic(ROW), tmp_path / "m", max_shard_bytes=0)
    model = language_model()
    octavo.convert(model.model, ROW, convert_head=True)
    with pytest.raises(ConfigError, match=r"shares its weight.* leave out convert_head \(--head\), or skip 'lm_head'"):
        save_quantized(model, tmp_path / "m")
    blocks, scales = dynamic("blockwise"), static(kv_cache=True)[1]
    with pytest.raises(ConfigError, match="no scales of keys and values"):
        save_quantized(blocks, tmp_path / "m", format="hf-fp8", kv_scales=scales)
    for wrong, words in (
        ({0: scales[0]}, "layer 1 has no scales"),
        (scales | {7: scales[0]}, "no 'model.layers.7.self_attn'"),
        (scales | {1: (scales[1][0], torch.tensor(torch.nan))}, "one positive, finite number"),
        (scales | {1: (scales[1][0], torch.zeros(()))}, "one positive, finite number"),
        (scales | {1: (scales[1][0], torch.ones(2))}, "one positive, finite number"),
    ):
        with pytest.raises(ConfigError, match=words):
            save_quantized(dynamic(ROW), tmp_path / "m", kv_scales=wrong)
    model, _ = static()
    model.model.get_submodule(LAYER).input_scale.zero_()
    with pytest.raises(ConfigError, match="no scale for its static input"):
        save_quantized(model, tmp_path / "m")
    mixed = language_model()
    octavo.convert(mixed.model, "blockwise", overrides={"*.down_proj": "rowwise"})
    with pytest.raises(ConfigError, match="it has weights with a scale a row"):
        save_quantized(mixed, tmp_path / "m", format="hf-fp8")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_not_written_to(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        save_quantized(dynamic(ROW), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, file):
    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    target = {"config.json": "write_json", "model.safetensors": "write_tensors"}.get(file)
    if target is None:
        monkeypatch.setattr(Path, "write_bytes", full)
    else:
        monkeypatch.setattr(checkpoint_writer, target, full)
    with pytest.raises(OSError, match="No space left"):
        save_quantized(dynamic(ROW), tmp_path / "m")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root alone")
def test_a_disk_that_is_really_full(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            save_quantized(dynamic(ROW), place / "m", verify_folder=False)
        assert caught.value.errno == errno.ENOSPC
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_every_format_says_what_servers_do_with_it():
    from octavo.export.servers import DOES, SOURCES

    assert DOES.keys() == FORMATS.keys()
    assert all(servers.keys() == SOURCES.keys() for servers in DOES.values())


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_a_context_of_one_token(tmp_path):
    """There is nothing to continue, and everything else is compared."""
    model = dynamic(ROW)
    saved = save_quantized(replace(model, context=1), tmp_path / "m", format="octavo")
    assert (verdict(saved).greedy_tokens, verdict(saved).greedy_equal) == (0, 0)
    assert verdict(saved).logits_error < 1e-6


@pytest.mark.parametrize("make", [float, torch.Tensor.double, torch.Tensor.bfloat16], ids=["float", "double", "bf16"])
def test_scales_of_keys_and_values_are_written_in_fp32(tmp_path, make):
    model, scales = static(kv_cache=True)
    given = {index: (make(key), make(value)) for index, (key, value) in scales.items()}
    save_quantized(model, tmp_path / "m", kv_scales=given, verify_folder=False)
    for index, pair in load_quantized(tmp_path / "m").kv_scales.items():
        for found, wanted in zip(pair, given[index], strict=True):
            assert found.dtype == torch.float32
            assert found == torch.as_tensor(wanted, dtype=torch.float32)


@pytest.mark.parametrize(
    "pair",
    [0.5, (0.5,), (0.5, 0.5, 0.5), (0.5, "0.5"), (0.5, None), (0.5, True), (1e-60, 0.5), (0.5, 1e60), (-0.5, 0.5)],
)
def test_scales_of_keys_and_values_that_are_none(tmp_path, pair):
    model, scales = static(kv_cache=True)
    with pytest.raises(ConfigError, match=r"layer 1 are .*; give a pair, each one positive, finite number"):
        save_quantized(model, tmp_path / "m", kv_scales=scales | {1: pair}, verify_folder=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verify_folder", [False, True])
def test_a_number_beyond_float16_is_not_written_as_infinity(tmp_path, verify_folder):
    model = dynamic(ROW)
    model.model.get_parameter("model.norm.weight").data[3] = -70000.0
    with pytest.raises(ConfigError, match=r"model.norm.weight holds 70000, and float16 ends at 65504"):
        save_quantized(model, tmp_path / "m", dtype="fp16", verify_folder=verify_folder)
    assert not list(tmp_path.iterdir())
    save_quantized(model, tmp_path / "m", dtype="bf16", verify_folder=False)


@pytest.fixture(scope="module")
def mixture():
    """A Qwen3 of two experts, as transformers has it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = replace(language_model(), model=transformers.Qwen3MoeForCausalLM(config).eval())
    octavo.convert(model.model, "rowwise")
    return model


@pytest.mark.parametrize("fmt", ["compressed-tensors", "hf-fp8", "modelopt"])
def test_experts_are_not_written_under_names_that_no_server_reads(mixture, tmp_path, fmt):
    words = f"this model has experts, 'model.layers.0.mlp.experts.gate_up_proj' and 1 more .* no server reads in {fmt};"
    words += " octavo.convert.unfuse_experts before octavo.convert divides those that files name one by one"
    with pytest.raises(ConfigError, match=words):
        save_quantized(mixture, tmp_path / "m", format=fmt, verify_folder=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_experts_in_octavos_own_format(mixture, tmp_path):
    """It says what it wrote to octavo alone, which reads it."""
    saved = save_quantized(mixture, tmp_path / "m", format="octavo")
    assert verdict(saved).logits_error < 1e-5
    recipes = [each.recipe for each in layers_in_high_precision(mixture.model)]
    assert len(recipes) == 2
    assert not any(each.is_high_precision for each in recipes)  # as before
    assert any("run FP8 recipes here and are written in high precision" in note for note in saved.notes)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "m" / "model.safetensors")
