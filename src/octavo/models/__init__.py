"""Models to train: a Llama-style decoder and how to sample from it."""

from octavo.models.generation import generate
from octavo.models.llama import Llama, LlamaConfig

__all__ = ["Llama", "LlamaConfig", "generate"]
