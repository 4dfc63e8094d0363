"""A folder read by transformers with compressed-tensors: layers on its own inputs, and all logits, bit for bit."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import octavo
from octavo.engines import get, model_as
from octavo.export.checkpoint_writer import save_quantized
from octavo.language_model import load_language_model
from tests.unit.checkpoints.folders import ROW, static
from tests.unit.quantization.tiny_models import LINEARS, language_model, windows

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("compressed_tensors") is None or find_spec("transformers") is None,
        reason="compressed-tensors or transformers is not installed",
    ),
]
TOKENS = windows(1, 24)


def folder_of(kind, path):
    if kind == "dynamic":
        model = language_model()
        octavo.convert(model.model, ROW)
    else:
        model, _ = static()
    save_quantized(model, path, verify_folder=False)
    return path


def read_by_transformers(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_layers_compute_what_its_own_code_does(kind, tmp_path):
    folder = folder_of(kind, tmp_path / "m")
    theirs, seen = read_by_transformers(folder), {}
    profile = get("compressed-tensors" if kind == "dynamic" else "compressed-tensors-static")
    ours = model_as(
        load_language_model(folder).model, replace(profile, activations=torch.float32, output=torch.float32)
    )
    for path in ours.layers:
        layer = theirs.get_submodule(path)
        layer.register_forward_hook(lambda _, given, y, path=path: seen.update({path: (given[0], y)}))
    with torch.no_grad():
        expected = theirs(input_ids=TOKENS).logits
    assert len(seen) == len(ours.layers) == LINEARS
    for path, (x, y) in seen.items():
        assert torch.equal(ours.layers[path](x), y), path
    assert torch.equal(ours(TOKENS), expected)
