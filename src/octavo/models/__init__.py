"""Language models: a Llama-style decoder, loading of its weights, and text generation."""

from octavo.models.generation import FullPass, generate
from octavo.models.gguf import GGUFModel, load_gguf
from octavo.models.llama import Llama, LlamaConfig

__all__ = ["FullPass", "GGUFModel", "Llama", "LlamaConfig", "generate", "load_gguf"]
