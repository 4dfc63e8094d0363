"""Generation: a model whose weights are FP8 codes, the cache of its keys and values, and an engine that serves many."""

from octavo.serving.engine import Engine, EngineConfig
from octavo.serving.engine_thread import Answer, EngineThread
from octavo.serving.generation import generate
from octavo.serving.kv_cache import KVCacheBatch, PagedKVCache
from octavo.serving.metrics import EngineMetrics, Histogram, Load
from octavo.serving.model_runner import ModelRunner
from octavo.serving.recipes import ServingRecipe
from octavo.serving.requests import Event, FinishReason, Usage
from octavo.serving.sampling import SamplingParams
from octavo.serving.served_model import ServedModel, load_served_model

__all__ = [
    "Answer",
    "Engine",
    "EngineConfig",
    "EngineMetrics",
    "EngineThread",
    "Event",
    "FinishReason",
    "Histogram",
    "KVCacheBatch",
    "Load",
    "ModelRunner",
    "PagedKVCache",
    "SamplingParams",
    "ServedModel",
    "ServingRecipe",
    "Usage",
    "generate",
    "load_served_model",
]
