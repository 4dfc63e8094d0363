"""From a trained model to one in FP8: the text to measure it on."""

from octavo.quantization.windows import text_windows

__all__ = ["text_windows"]
