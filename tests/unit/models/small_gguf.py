"""Small GGUF files, written by the library's own writer: a Llama of random weights and a byte-level tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
MERGES = ["1 2", "Ġ t", "h e", "Ġt he"]
BOS, EOS, NOTE = "<|bos|>", "<|eos|>", "<note>"
TOKENS = [BOS, EOS, NOTE, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SETTINGS: dict[str, Any] = {
    "llama.context_length": 32,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100.0,
    "llama.rope.dimension_count": HIDDEN // HEADS,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(TOKENS) - 3)],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages }}",
}
ENCODINGS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1")


def shapes(*, tied: bool) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN * KV_HEADS // HEADS
    of_a_layer = {
        "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    outer = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    outer |= {} if tied else {"output": (len(TOKENS), HIDDEN)}
    layers = {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in of_a_layer.items()}
    return {f"{name}.weight": shape for name, shape in {**outer, **layers}.items()}


def weights(*, tied: bool = True) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    found = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes(tied=tied).items()}
    return {name: 1 + 0.1 * w if w.ndim == 1 else 0.2 * w for name, w in found.items()}


def write(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    encoding: str = "F32",
    architecture: str = "llama",
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write a file; ``settings`` change the ones above, and None leaves one out."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (SETTINGS | (settings or {})).items():
        _add(writer, name, value)
    for name, tensor in (weights() if tensors is None else tensors).items():
        kind = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else encoding]
        if tensor.dtype == np.float32:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if name == "general.alignment":
        writer.add_custom_alignment(value)  # which pads the tensors to it too
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif value is not None:
        adders[type(value)](name, value)
