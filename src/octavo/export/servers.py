"""Support for each checkpoint format in programs that load language models, with sources."""

from types import MappingProxyType

__all__ = ["DOES", "SOURCES"]

VLLM, SGLANG, TENSORRT_LLM, TRANSFORMERS = "vLLM", "SGLang", "TensorRT-LLM", "transformers"
NOTHING = "refuses: unknown model_type"

# Computation with the format's weights. "FP8 products" need an Ada, Hopper or Blackwell GPU, or an MI300.
DOES = MappingProxyType(
    {
        "compressed-tensors": {
            VLLM: "FP8 products; weight-only on older GPUs",
            SGLANG: "FP8 products",
            TENSORRT_LLM: "not listed",
            TRANSFORMERS: "decodes, casts inputs, multiplies in high precision",
        },
        "hf-fp8": {
            VLLM: "FP8 products; in_features must be a multiple of 128",
            SGLANG: "FP8 products; in_features must be a multiple of 128",
            TENSORRT_LLM: "FP8 products (DeepSeek)",
            TRANSFORMERS: "FP8 products on a GPU; decodes to BF16 on a CPU, inputs not cast; blocks must be whole",
        },
        "modelopt": {
            VLLM: "FP8 products; q, k, v and gate, up recoded to their largest scale",
            SGLANG: "FP8 products on Hopper and newer; recoded as by vLLM",
            TENSORRT_LLM: "FP8 products",
            TRANSFORMERS: "reads codes after import octavo.compat.huggingface; else wrong results without an error",
        },
        "octavo": {
            VLLM: NOTHING,
            SGLANG: NOTHING,
            TENSORRT_LLM: NOTHING,
            TRANSFORMERS: "reads codes after import octavo.compat.huggingface; refuses without it",
        },
    }
)

SOURCES = MappingProxyType(
    {
        VLLM: "docs.vllm.ai, Features > Quantization > FP8 W8A8",
        SGLANG: "docs.sglang.io, Advanced features > Quantization",
        TENSORRT_LLM: "NVIDIA Model Optimizer, Unified HuggingFace Checkpoint",
        TRANSFORMERS: "octavo's tests, with transformers 5.23 and compressed-tensors 0.20",
    }
)
