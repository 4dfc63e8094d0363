"""Export of FP8 checkpoints for other programs, verified by reading them back."""

from octavo.checkpoints import QuantizedModel, load_quantized
from octavo.export.checkpoint_writer import SavedCheckpoint, save_quantized

__all__ = ["QuantizedModel", "SavedCheckpoint", "load_quantized", "save_quantized"]
