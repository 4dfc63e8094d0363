"""What octavo.compat hands out is exactly this."""

from octavo import compat
from octavo.compat.transformer_engine import common, pytorch

MODULES = {
    "DotProductAttention", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention", "RMSNorm",
    "TransformerLayer",
}  # fmt: skip
FUNCTIONS = {"autocast", "checkpoint", "fp8_autocast", "fp8_model_init", "quantized_model_init"}
RECIPES = {"DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP8BlockScaling", "Recipe"}


def test_names():
    assert compat.__all__ == ["DynamicScaler"]
    assert set(pytorch.__all__) == MODULES | FUNCTIONS
    assert set(common.recipe.__all__) == RECIPES
