"""Transformer Engine's names without a counterpart in octavo, with alternatives.

They can be imported from the package and raise an error when called.
"""

from typing import Any

from octavo.compat.transformer_engine.common.placeholder import refused

__all__ = ["NOT_SERVED", "__getattr__"]

_CODES = "octavo.quantize(x, octavo.E4M3) returns a QuantizedTensor of codes and scale"
_FOUR_BITS = "octavo computes in FP8, not in FP4; use octavo.quantize with an FP8 format"
_EXPERTS = "octavo does not route tokens; index them yourself and use one Linear per expert"
_OVERLAP = "octavo does not overlap communication; leave the call out"
_OFFLOAD = "use torch.autograd.graph.save_on_cpu()"
_CASTS = "define each cast with octavo.recipes.Recipe and use octavo.autocast"
_DEVICE = "use torch.cuda or torch.backends.cudnn; octavo's recipes run on every device"
_GATES = "chunk and stack the tensor with torch; octavo's gated activations take [gate, value] halves"

NOT_SERVED = {
    **dict.fromkeys(("GroupedLinear", "Fp8Padding", "Fp8Unpadding"), "use one Linear for each group"),
    **dict.fromkeys(("GatedDeltaNetAttention", "GatedDeltaNet2Attention"), "octavo has only DotProductAttention"),
    **dict.fromkeys(("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), _OVERLAP),
    **dict.fromkeys(("get_cpu_offload_context", "mark_not_offload", "ManualOffloadSynchronizer"), _OFFLOAD),
    **dict.fromkeys(("moe_permute", "moe_permute_with_probs", "moe_permute_and_pad_with_probs"), _EXPERTS),
    **dict.fromkeys(("moe_unpermute", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"), _EXPERTS),
    **dict.fromkeys(("interleave_glu_tensor", "deinterleave_glu_tensor"), _GATES),
    **dict.fromkeys(("get_cudnn_version", "get_device_compute_capability"), _DEVICE),
    **dict.fromkeys(("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest", "apply_recipe"), _CASTS),
    **dict.fromkeys(("quantization_backward_scope",), _CASTS),
    **dict.fromkeys(("QuantizedTensor", "QuantizedTensorStorage", "Quantizer", "DType"), _CODES),
    **dict.fromkeys(("Float8Tensor", "Float8TensorStorage", "Float8Quantizer"), _CODES),
    **dict.fromkeys(("Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "Float8BlockwiseQTensor"), _CODES),
    **dict.fromkeys(("Float8BlockwiseQTensorStorage", "MXFP8Tensor", "MXFP8TensorStorage", "MXFP8Quantizer"), _CODES),
    **dict.fromkeys(("NVFP4Tensor", "NVFP4TensorStorage", "NVFP4Quantizer"), _FOUR_BITS),
    "make_graphed_callables": "use torch.compile, or torch.cuda.make_graphed_callables",
    "onnx_export": "write a graph with octavo export MODEL --format onnx",
    "parallel_cross_entropy": "use torch.nn.functional.cross_entropy",
    "InferenceParams": "octavo.nn.KVCache stores the keys and values of octavo.nn's attention",
    "RotaryPositionEmbedding": "octavo.nn.rotary_table creates the rotary table for octavo.nn's attention",
    "CudaRNGStatesTracker": "octavo has no tensor-parallel dropout; use torch.random.fork_rng",
}


def __getattr__(name: str) -> Any:
    """Return a placeholder that raises when called, for a name of :data:`NOT_SERVED`."""
    if name not in NOT_SERVED:
        raise AttributeError(f"octavo.compat.transformer_engine.pytorch has no attribute {name!r}")
    return refused(name, NOT_SERVED[name])
