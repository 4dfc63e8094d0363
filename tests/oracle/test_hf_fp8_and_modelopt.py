"""hf-fp8 and ModelOpt's format, decoded by others: transformers, and numpy by what the formats' descriptions say.

compressed-tensors has an oracle of its own (test_compressed_tensors.py). These two have none that runs whole on a CPU:
transformers decodes hf-fp8's weights there and casts no inputs, and of ModelOpt's it has no reader.
"""

from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import octavo
from octavo.checkpoints import load_quantized
from octavo.export.checkpoint_writer import save_quantized
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.text.tokenizer import train_tokenizer
from tests.tiny_llama import tiny_llama_config
from tests.unit.checkpoints.folders import layer_of
from tests.unit.quantization.tiny_models import windows

BLOCK = 128


def model(intermediate_size):
    """Weights in several blocks of very different magnitude."""
    shape = tiny_llama_config(hidden_size=256, intermediate_size=intermediate_size, num_layers=1)
    made = Llama(shape, seed=5).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("proj.weight"):
                rows, columns = (torch.arange(size) // BLOCK for size in weight.shape)
                weight.mul_(4.0 ** (rows[:, None] - 2 * columns))
    tokenizer = train_tokenizer(["some text, some more text"] * 3, vocab_size=300)
    return LanguageModel(model=made, tokenizer=tokenizer, context=64, source="a test")


def blocks(folder, intermediate_size):
    source = model(intermediate_size)
    octavo.convert(source.model, "blockwise")
    save_quantized(source, folder, format="hf-fp8", dtype="fp32", verify_folder=False)


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    source, folder = model(384), tmp_path_factory.mktemp("modelopt") / "m"
    octavo.calibrate(source.model, [windows()]).apply(source.model)
    save_quantized(source, folder, format="modelopt", dtype="fp32", verify_folder=False)
    return folder


def as_numbers(codes):
    """E4M3 bytes as FP32."""
    return codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def scales_of(folder, name):
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return file.get_tensor(name)


@pytest.mark.parametrize("intermediate_size", [384, 320], ids=["whole blocks", "two and a half"])
def test_each_block_is_its_codes_times_its_scale(tmp_path, intermediate_size):
    """Element by element: weight[i, j] · weight_scale_inv[i // 128, j // 128]."""
    blocks(tmp_path / "m", intermediate_size)
    read, tensors = load_quantized(tmp_path / "m"), load_file(tmp_path / "m" / "model.safetensors")
    assert len(read.recipes) == 7
    for path in read.recipes:
        numbers, scale = as_numbers(tensors[f"{path}.weight"]), scales_of(tmp_path / "m", f"{path}.weight_scale_inv")
        assert scale.shape == tuple(-(-size // BLOCK) for size in numbers.shape)
        assert scale.max() > 8 * scale.min()
        wanted = np.empty_like(numbers)
        for i, j in np.ndindex(numbers.shape):
            wanted[i, j] = numbers[i, j] * scale[i // BLOCK, j // BLOCK]
        held = layer_of(read.model, path).stored_codes()
        assert held is not None
        np.testing.assert_array_equal(held.dequantize().numpy(), wanted)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@torch.no_grad()
def test_transformers_decodes_the_blocks_to_the_same_weights(tmp_path):
    """Of whole blocks: others it refuses, or takes for blocks of another size."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    blocks(tmp_path / "m", 384)
    decoded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    read = load_quantized(tmp_path / "m")
    theirs = decoded.state_dict()
    for name, own in read.model.state_dict().items():
        path = name.removesuffix(".weight")
        held = layer_of(read.model, path).stored_codes() if path in read.recipes else None
        if not name.endswith((".weight_scale", ".weight_codes")):
            assert torch.equal(theirs[name].float(), own if held is None else held.dequantize()), name
    octavo.restore(read.model)  # inputs that are not cast, as there
    torch.testing.assert_close(decoded(windows()).logits, read.model(windows()), rtol=1e-4, atol=1e-5)


def test_modelopts_layers_are_what_its_description_says(static):
    """y = (E4M3(x / input_scale) · input_scale) @ (weight · weight_scale).T, in float64."""
    read, tensors = load_quantized(static), load_file(static / "model.safetensors")
    assert len(read.recipes) == 7
    for path in read.recipes:
        numbers = as_numbers(tensors[f"{path}.weight"])
        weight_scale, input_scale = (scales_of(static, f"{path}.{name}_scale") for name in ("weight", "input"))
        assert weight_scale.shape == input_scale.shape == ()
        layer = layer_of(read.model, path)
        held = layer.stored_codes()
        assert held is not None
        np.testing.assert_array_equal(held.dequantize().numpy(), numbers * weight_scale)
        x = np.random.default_rng(0).normal(size=(16, numbers.shape[1])).astype(np.float32) * 200 * input_scale
        scaled = np.clip(x * (np.float32(1) / input_scale), -448, 448)  # octavo multiplies by the reciprocal
        codes = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        wanted = (codes * input_scale) @ (numbers.astype(np.float64) * weight_scale).T
        found = layer(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
