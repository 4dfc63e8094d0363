"""Models on their way to whoever serves them: checkpoints in FP8 that are read back before they count."""

from octavo.export.writing import Saved, save_quantized
from octavo.interchange import QuantizedModel, load_quantized

__all__ = ["QuantizedModel", "Saved", "load_quantized", "save_quantized"]
