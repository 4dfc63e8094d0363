"""FP8 folders that transformers reads with octavo's quantizer."""

import re
import subprocess
import sys

import pytest
import torch

import octavo
from octavo.errors import CheckpointError, ConfigError
from octavo.nn.fp8_weight import FP8WeightLinear
from tests.tiny_llama import tiny_hugging_face_config
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
