"""What octavo hands out is exactly this, documented, with examples that run."""

import doctest
import importlib
import inspect
import operator

import pytest
import torch

import octavo
from tests.policy.source_tree import modules

PUBLIC = {
    # formats and tensors
    "E4M3", "E5M2", "PerBlock", "PerRow", "PerTensor", "QuantizedTensor",
    "dequantize", "fake_quantize", "quantize", "scaled_mm",
    # recipes, and models in FP8
    "autocast", "convert", "recipes", "restore",
    # delayed scaling's state
    "load_scaling_state", "nonfinite_counts", "scaling_state", "update_scales",
    # calibration
    "calibrate", "load_calibration",
    # quantization-aware training
    "convert_qat", "prepare_qat",
    # checkpoints in FP8
    "load_quantized", "save_quantized",
    # trainer and server
    "agree", "rl",
    # figures
    "plot",
    # modules
    "nn",
}  # fmt: skip
PUBLIC_NN = {
    # linear layers, alone and behind a norm
    "GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear",
    # what stands between them
    "DotProductAttention", "KVCache", "LayerNorm", "RMSNorm", "RotaryScaling", "rotary_table", "rotate",
    "rounded_parameters",
    # made of both
    "MultiheadAttention", "TransformerLayer",
}  # fmt: skip

# Command-line modules are documented by --help; a doctest there would start commands.
WITH_EXAMPLES = sorted(name for name in modules() if ".cli" not in name and "__main__" not in name)


def test_all_is_exactly_this():
    assert octavo.__all__ == sorted(PUBLIC)
    assert octavo.nn.__all__ == sorted(PUBLIC_NN)


def test_all_names_exist_and_nothing_else_looks_public():
    submodules = {name.split(".")[1] for name in modules() if "." in name}
    shown = {name for name in vars(octavo) if not name.startswith("_")} - submodules
    assert shown <= set(octavo.__all__)
    assert all(hasattr(octavo, name) for name in octavo.__all__)


@pytest.mark.parametrize("name", [*octavo.__all__, *(f"nn.{name}" for name in octavo.nn.__all__), "recipes.get"])
def test_public_names_are_documented(name):
    thing = operator.attrgetter(name)(octavo)
    text = inspect.getdoc(thing if callable(thing) or inspect.ismodule(thing) else type(thing))
    assert text, f"octavo.{name} has no docstring"
    assert ">>>" in text or not callable(thing), f"octavo.{name} has no example"


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name):
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(module, extraglobs={"torch": torch, "octavo": octavo}):
        torch.manual_seed(0)
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
