"""Generation: a model whose weights are FP8 codes, and the cache of its keys and values."""

from octavo.serving.generation import generate
from octavo.serving.kv_cache import KVCacheBatch, PagedKVCache
from octavo.serving.model_runner import ModelRunner

__all__ = ["KVCacheBatch", "ModelRunner", "PagedKVCache", "generate"]
