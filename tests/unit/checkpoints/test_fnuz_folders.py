"""Folders in FNUZ codes: written without loss, read back, and what cannot be kept is named."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from octavo.checkpoints import contents_of, load_quantized
from octavo.errors import ConfigError
from octavo.export.checkpoint_writer import save_quantized
from tests.unit.checkpoints.folders import DYNAMIC, LAYER, change_tensors, dynamic, layer_of, static, verdict
from tests.unit.cli.conftest import run_octavo

KINDS = [*DYNAMIC, "static", "modelopt"]
NAMES = {"hf-fp8": "weight_scale_inv"}


def made(kind):
    """A model, the format of its folder, and scales of keys and values."""
    if kind in DYNAMIC:
        fmt, recipe = DYNAMIC[kind]
        return dynamic(recipe), fmt, {}
    model, scales = static(kv_cache=True)
    return model, "modelopt" if kind == "modelopt" else "compressed-tensors", scales


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_in_fnuz_decodes_to_the_same_model(kind, tmp_path):
    model, fmt, scales = made(kind)
    save_quantized(model, tmp_path / "ocp", format=fmt, kv_scales=scales, verify_folder=False)
    save_quantized(model, tmp_path / "fnuz", format=fmt, kv_scales=scales, fnuz=True, verify_folder=False)
    ocp, fnuz = (load_file(tmp_path / name / "model.safetensors") for name in ("ocp", "fnuz"))
    coded = [name for name, tensor in fnuz.items() if tensor.dtype is torch.float8_e4m3fnuz]
    assert coded == [name for name, tensor in ocp.items() if tensor.dtype is torch.float8_e4m3fn]
    assert coded
    scale = NAMES.get(fmt, "weight_scale")
    for name in coded:
        assert not (fnuz[name].view(torch.uint8) == 0x80).any()
        assert torch.equal(fnuz[name].double() * 2, ocp[name].double())
        of = name.removesuffix("weight") + scale
        moved = fnuz[of].int() - 1 if fnuz[of].dtype is torch.uint8 else fnuz[of] / 2
        assert torch.equal(moved, ocp[of].to(moved.dtype))
    read, back = load_quantized(tmp_path / "ocp"), load_quantized(tmp_path / "fnuz")
    assert set(back.from_fnuz) == set(back.recipes)
    assert set(back.from_fnuz.values()) == {0}
    assert not read.from_fnuz
    assert back.kv_scales.keys() == read.kv_scales.keys()
    assert all(
        torch.equal(*both) for i in read.kv_scales for both in zip(read.kv_scales[i], back.kv_scales[i], strict=True)
    )
    expected, got = read.model.state_dict(), back.model.state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name].float(), got[name].float()) for name in expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rows", "modelopt"])
def test_it_is_verified_by_another_process(kind, tmp_path):
    model, fmt, scales = made(kind)
    saved = save_quantized(model, tmp_path / "fnuz", format=fmt, kv_scales=scales, fnuz=True)
    assert saved.reader == "octavo"
    assert verdict(saved).logits_error < 1e-3
    assert any("FNUZ" in note for note in saved.notes)


def test_a_value_beyond_e4m3_is_named(tmp_path):
    save_quantized(dynamic("tensorwise"), tmp_path / "fnuz", fnuz=True, verify_folder=False)

    def largest(tensors):
        codes = tensors[f"{LAYER}.weight"].view(torch.uint8)
        codes[0, :3] = torch.tensor([0x7F, 0x01, 0x03])  # 240, and two numbers finer than E4M3's

    change_tensors(tmp_path / "fnuz", largest)
    read = load_quantized(tmp_path / "fnuz")
    weight = layer_of(read.model, LAYER).stored_codes()
    assert weight is not None
    assert weight.data[0, :3].float().tolist() == [240.0, 0.0, 2 * 2.0**-9]  # 1.5 and 0.5 steps round to even
    assert read.from_fnuz[LAYER] >= 2
    assert sum(count > 0 for count in read.from_fnuz.values()) == 1
    printed = run_octavo("import", tmp_path / "fnuz").output
    assert f"weights of {LAYER} are not in E4M3 and were rounded" in " ".join(printed.split())
    record = json.loads(run_octavo("import", tmp_path / "fnuz", "--json").output)
    assert record["from_fnuz"] == dict(read.from_fnuz)


@pytest.mark.long
def test_importing_writes_ocp_codes(tmp_path):
    save_quantized(dynamic("tensorwise"), tmp_path / "fnuz", fnuz=True, verify_folder=False)
    run_octavo("import", tmp_path / "fnuz", "--out", tmp_path / "ocp", "--format", "compressed-tensors")
    run_octavo("export", tmp_path / "ocp", "--out", tmp_path / "again", "--fnuz")
    with safe_open(tmp_path / "ocp" / "model.safetensors", "pt") as file:
        assert file.get_slice(f"{LAYER}.weight").get_dtype() == "F8_E4M3"
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("fnuz", "again"))
    assert torch.equal(first[f"{LAYER}.weight"].view(torch.uint8), again[f"{LAYER}.weight"].view(torch.uint8))


def test_what_fnuz_cannot_express_is_refused():
    contents = contents_of(dynamic("tensorwise").model)
    layer = contents.layers[LAYER]
    codes = torch.full_like(layer.weight.data.float(), 448.0).to(torch.float8_e4m3fn)
    weight = replace(layer.weight, data=codes, scale=torch.tensor(2.0**127))
    broken = replace(contents, layers={**contents.layers, LAYER: replace(layer, weight=weight)})
    with pytest.raises(ConfigError, match=f"{codes.numel()} weights of layer '{LAYER}' are infinite, or have a scale"):
        broken.in_fnuz()


def test_a_repository_for_triton_has_ocp_codes(tmp_path):
    result = run_octavo("export", "no-model", "--out", tmp_path / "out", "--format", "triton", "--fnuz")
    assert result.exit_code != 0
    assert "--format triton has OCP codes" in " ".join(result.output.split())
