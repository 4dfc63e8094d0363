"""Transformer Engine's other names: what octavo has no counterpart of, and what to use in its place.

They can be imported, and are refused by name when they are called.
"""

from octavo.compat.transformer_engine.common.refused import refused

__all__ = [
    "CudaRNGStatesTracker",
    "Float8Quantizer",
    "Float8Tensor",
    "GroupedLinear",
    "InferenceParams",
    "get_cpu_offload_context",
    "make_graphed_callables",
    "moe_permute",
    "moe_unpermute",
    "onnx_export",
    "parallel_cross_entropy",
]

_CODES = "octavo.quantize(x, octavo.E4M3) gives a QuantizedTensor of codes and scale"
_EXPERTS = "octavo routes no tokens; index them yourself, and use one Linear for each expert"

GroupedLinear = refused("GroupedLinear", "use one Linear for each group")
make_graphed_callables = refused("make_graphed_callables", "use torch.compile, or torch.cuda.make_graphed_callables")
get_cpu_offload_context = refused("get_cpu_offload_context", "use torch.autograd.graph.save_on_cpu()")
onnx_export = refused("onnx_export", "write a graph with octavo export MODEL --format onnx")
parallel_cross_entropy = refused("parallel_cross_entropy", "use torch.nn.functional.cross_entropy")
InferenceParams = refused("InferenceParams", "octavo.nn.KVCache keeps the keys and values of octavo.nn's attention")
CudaRNGStatesTracker = refused(
    "CudaRNGStatesTracker", "octavo has no tensor-parallel dropout; use torch.random.fork_rng"
)
moe_permute, moe_unpermute = refused("moe_permute", _EXPERTS), refused("moe_unpermute", _EXPERTS)
Float8Quantizer, Float8Tensor = refused("Float8Quantizer", _CODES), refused("Float8Tensor", _CODES)
