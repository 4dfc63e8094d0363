"""Sizes are those of safetensors files that are really written."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import octavo
from octavo.quantization.comparison.storage import file_tensors, storage_of
from octavo.quantization.comparison.variants import RECIPES, from_recipe, high_precision, int8
from tests.unit.quantization.tiny_models import HEAD_DIM, SHAPE, language_model


def written(model, folder, rest=torch.bfloat16):
    """Bytes of the tensors in a file: all of it but its header."""
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in file_tensors(model, rest).items()}, path)
    return path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little"), load_file(path)


def made(name, model):
    if name == "int8":
        pytest.importorskip("torchao", reason="torchao is not installed")
        return int8(model)
    return from_recipe(model, name) if name in RECIPES else high_precision(model, name)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", *RECIPES])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_has_as_many_bytes(name, tied, tmp_path):
    contestant = made(name, language_model(tied=tied))
    size, _ = written(contestant.language_model.model, tmp_path, contestant.surrounding)
    assert contestant.storage.file_bytes == size


def test_the_sizes_are_those_of_the_shapes():
    """Matrices of the two layers, counted by hand: one byte each, and the scales of their granularity."""
    hidden, inner, kv = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_kv_heads * HEAD_DIM
    layers = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden), (inner, hidden), (inner, hidden)]
    layers = 2 * [*layers, (hidden, inner)]
    weights = sum(rows * columns for rows, columns in layers)
    rest = SHAPE.vocab_size * hidden + 5 * hidden
    scales = {
        "fp8-dynamic": len(layers),
        "fp8-rowwise": sum(rows for rows, _ in layers),
        "fp8-blockwise": sum(math.ceil(rows / 128) * math.ceil(columns / 128) for rows, columns in layers),
    }
    model = language_model()
    for name, count in scales.items():
        assert from_recipe(model, name).storage.file_bytes == weights + 4 * count + 2 * rest
    assert high_precision(model, "bf16").storage.file_bytes == 2 * (weights + rest)
    assert high_precision(model, "fp32").storage.file_bytes == 4 * (weights + rest)


def test_memory_is_what_the_process_holds():
    """The distinct storages of parameters and of the state's buffers."""
    model = from_recipe(language_model(), "fp8-rowwise").language_model.model
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.state_dict().values()
    }
    assert storage_of(model).memory_bytes == sum(held.values())


def test_the_scale_of_a_static_input_is_in_the_file(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    octavo.convert(model, "static")
    octavo.load_scaling_state(model, {"0.input.scale": torch.tensor(0.5)})
    size, tensors = written(model, tmp_path)
    assert size == 2 * (8 * 4 + 4) + 4
    assert tensors["0.input.scale"] == 0.5


def test_file_stores_codes_and_scales_unchanged(tmp_path):
    model = from_recipe(language_model(), "fp8-rowwise").language_model.model
    _, tensors = written(model, tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    assert tensors[f"{name}_codes"].dtype == torch.float8_e4m3fn
    assert tensors[f"{name}_scale"].dtype == torch.float32
    assert torch.equal(tensors[f"{name}_scale"], model.state_dict()[f"{name}_scale"])
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert "lm_head.weight" not in tensors, "a shared tensor is in the file twice"
