"""Text generation on a CPU: a model with FP8 weights, its key-value cache, and an engine for concurrent requests."""

from octavo.inference.engine import Engine, EngineConfig, Runner
from octavo.inference.engine_thread import Answer, EngineThread
from octavo.inference.events import Event, FinishReason, Usage
from octavo.inference.kv_cache import KVCacheBatch, PagedKVCache
from octavo.inference.metrics import EngineMetrics, LatencyHistogram, Load
from octavo.inference.model_runner import ModelRunner
from octavo.inference.profile_runner import ProfileRunner
from octavo.inference.recipes import ServingRecipe
from octavo.inference.sampling import SamplingParams
from octavo.inference.served_model import ServedModel, load_served_model, load_served_model_as
from octavo.models import generate

__all__ = [
    "Answer",
    "Engine",
    "EngineConfig",
    "EngineMetrics",
    "EngineThread",
    "Event",
    "FinishReason",
    "KVCacheBatch",
    "LatencyHistogram",
    "Load",
    "ModelRunner",
    "PagedKVCache",
    "ProfileRunner",
    "Runner",
    "SamplingParams",
    "ServedModel",
    "ServingRecipe",
    "Usage",
    "generate",
    "load_served_model",
    "load_served_model_as",
]
