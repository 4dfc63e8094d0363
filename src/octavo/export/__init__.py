"""Export of FP8 checkpoints for other programs, verified by reading them back."""

from octavo.export.writing import SavedCheckpoint, save_quantized
from octavo.interchange import QuantizedModel, load_quantized

__all__ = ["QuantizedModel", "SavedCheckpoint", "load_quantized", "save_quantized"]
