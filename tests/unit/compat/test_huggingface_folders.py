"""FP8 folders that transformers reads with octavo's quantizer."""

import re
import subprocess
import sys

import pytest
import torch

import octavo
from octavo.convert import unfuse_experts
from octavo.errors import CheckpointError, ConfigError
from octavo.export.checkpoint_writer import save_quantized
from octavo.nn import Linear
from octavo.nn.fp8_weight import FP8WeightLinear
from tests.tiny_llama import tiny_hugging_face_config
from tests.tiny_mixtures import EXPERTS, mixture
from tests.unit.checkpoints.folders import LAYER, change_config, change_tensors, layer_of, written

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from octavo.compat.huggingface import codes_config  # noqa: E402 (needs transformers)

KINDS = ["own rows", "own groups", "modelopt"]
OTHERS = ["rows", "tensors", "weights", "blocks"]  # of methods for which transformers has a quantizer
TOKENS = (torch.arange(24) % 50)[None]


def read(folder, **options):
    if folder.name in OTHERS:
        options["config"] = codes_config(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_codes_and_scales_are_the_files(tmp_path, kind):
    written(tmp_path / kind, kind)
    expected = octavo.load_quantized(tmp_path / kind)
    model, report = read(tmp_path / kind, output_loading_info=True)
    assert not any(report.values())
    for path in expected.recipes:
        layer, same = layer_of(model, path), layer_of(expected.model, path)
        assert isinstance(layer, FP8WeightLinear)
        assert layer.recipe == same.recipe
        assert torch.equal(layer.weight_codes.view(torch.uint8), same.weight_codes.view(torch.uint8))
        assert torch.equal(layer.weight_scale, same.weight_scale)
        assert "weight" not in layer._parameters


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_logits_equal_those_of_load_quantized(tmp_path, kind):
    written(tmp_path / kind, kind)
    expected = octavo.load_quantized(tmp_path / kind).model(TOKENS)
    logits = read(tmp_path / kind)(TOKENS).logits
    assert torch.equal(logits, expected)


def mixture_folder(folder, name, fmt="octavo", recipe="rowwise", **options):
    """Folder of a mixture, its model with a linear layer for each expert."""
    model = mixture(name)
    unfuse_experts(model.model)
    octavo.convert(model.model, recipe, **options)
    for number, layer in enumerate(each for each in model.model.modules() if isinstance(each, Linear)):
        if layer.recipe.has_static_input:
            layer.input_scale.fill_(0.01 + number / 1000)
    save_quantized(model, folder, format=fmt, verify_folder=False)
    return folder


def assert_codes_are_kept(model, expected):
    """Compare codes, scales and logits of a model with those of ``octavo.load_quantized``."""
    for path in expected.recipes:
        layer, same = layer_of(model, path), layer_of(expected.model, path)
        assert isinstance(layer, FP8WeightLinear)
        assert torch.equal(layer.weight_codes.view(torch.uint8), same.weight_codes.view(torch.uint8))
        assert torch.equal(layer.weight_scale, same.weight_scale)
    assert torch.equal(model(TOKENS).logits, expected.model(TOKENS).logits)


@pytest.mark.parametrize(
    ("name", "fmt", "recipe"),
    [
        ("Mixtral", "octavo", "rowwise"),
        ("Mixtral", "modelopt", "static"),
        ("Mixtral", "compressed-tensors", "rowwise"),
        ("Qwen3Moe", "octavo", "mxfp8"),
        ("Qwen3Moe", "hf-fp8", "blockwise"),
    ],
)
def test_codes_of_every_expert_are_kept(tmp_path, name, fmt, recipe):
    folder = mixture_folder(tmp_path / "m", name, fmt, recipe)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=codes_config(folder), dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    expected = octavo.load_quantized(folder)
    assert sum(".experts." in path for path in expected.recipes) == 2 * 3 * EXPERTS
    assert_codes_are_kept(model, expected)


def test_experts_in_high_precision_are_read_beside_codes(tmp_path):
    folder = mixture_folder(tmp_path / "m", "Mixtral", skip=["*.layers.1.mlp.experts.*"])
    model, report = read(folder, output_loading_info=True)
    assert not any(report.values())
    expected = octavo.load_quantized(folder)
    assert sum(".experts." in path for path in expected.recipes) == 3 * EXPERTS
    assert_codes_are_kept(model, expected)


@pytest.mark.filterwarnings("ignore:.*stays as it is")
def test_experts_in_one_weight_are_read_beside_codes(tmp_path):
    folder = mixture_folder(tmp_path / "m", "GptOss", skip=["*.experts"])
    assert_codes_are_kept(read(folder), octavo.load_quantized(folder))


def test_mixture_read_from_a_folder_is_saved_plain(tmp_path):
    model = read(mixture_folder(tmp_path / "m", "Mixtral"))
    model.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    octavo.restore(model)
    for index in range(2):
        fused = plain.model.layers[index].mlp.experts
        for expert, layers in enumerate(model.model.layers[index].mlp.experts.experts()):
            assert torch.equal(fused.gate_up_proj[expert], torch.cat([layers["w1"].weight, layers["w3"].weight]))
            assert torch.equal(fused.down_proj[expert], layers["w2"].weight)
    torch.testing.assert_close(plain(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["own rows", "own groups"])
def test_transformers_without_octavos_quantizer_refuses_its_format(tmp_path, kind):
    written(tmp_path / kind, kind)
    load = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    command = [sys.executable, "-c", load, str(tmp_path / kind)]  # this module registers the quantizer in this process
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert re.search("ValueError: .*model type `octavo`", result.stderr)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of compressed-tensors
def test_transformers_decodes_the_weights_of_compressed_tensors_exactly(tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    written(tmp_path / "weights", "weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert torch.equal(model(TOKENS).logits, octavo.load_quantized(tmp_path / "weights").model(TOKENS))


@pytest.mark.parametrize("kind", ["own rows", "rows"])
def test_model_read_from_a_folder_is_saved_plain(tmp_path, kind):
    written(tmp_path / kind, kind)
    model = read(tmp_path / kind)
    model.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    octavo.restore(model)
    assert torch.equal(plain(TOKENS).logits, model(TOKENS).logits)


def test_configuration_for_codes_of_a_plain_folder_is_refused(tmp_path):
    tiny_hugging_face_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="holds no FP8 codes"):
        codes_config(tmp_path)


def test_default_dtype_is_the_folders(tmp_path):
    written(tmp_path / "m", "own rows")
    change_config(tmp_path / "m", lambda config: config.update(dtype="bfloat16"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model(TOKENS).logits.dtype == torch.bfloat16
    assert layer_of(model, LAYER).weight_codes.dtype == torch.float8_e4m3fn


def test_damaged_codes_are_refused(tmp_path):
    written(tmp_path / "m", "own rows")

    def change(tensors):
        tensors[f"{LAYER}.weight"].view(torch.uint8)[0, 0] = 0x7F

    change_tensors(tmp_path / "m", change)
    with pytest.raises(CheckpointError, match="holds NaN"):
        read(tmp_path / "m")


def test_unknown_model_type_is_refused(tmp_path):
    written(tmp_path / "m", "own rows")
    change_config(tmp_path / "m", lambda config: config.update(model_type="nonesuch"))
    with pytest.raises(CheckpointError, match="model_type is 'nonesuch', which this transformers does not have"):
        read(tmp_path / "m")


def test_several_devices_are_refused(tmp_path):
    written(tmp_path / "m", "own rows")
    with pytest.raises(ConfigError, match="onto one device"):
        read(tmp_path / "m", device_map={"model": "cpu", "lm_head": "disk"})
