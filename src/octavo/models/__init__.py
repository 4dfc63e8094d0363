"""Models to train and to run: a Llama-style decoder, where its weights come from, and how to sample from it."""

from octavo.models.generation import FullPass, generate
from octavo.models.gguf import GGUFModel, load_gguf
from octavo.models.llama import Llama, LlamaConfig

__all__ = ["FullPass", "GGUFModel", "Llama", "LlamaConfig", "generate", "load_gguf"]
