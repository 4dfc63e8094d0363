"""Engines under which benchmarks train, each with the recipe of its gradients."""

__all__ = ["ENGINES"]

ENGINES = {
    "vllm-token": "rowwise",
    "vllm-block": "blockwise",
    "sglang-block": "blockwise",
    "te-block": "blockwise",
    "te-current": "tensorwise",
}
