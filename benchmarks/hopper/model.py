"""A Llama of a billion parameters with random BF16 weights, created on the GPU that is measured."""

import torch
from torch import nn

from benchmarks.hopper.session import Session
from octavo.models.llama import Llama, LlamaConfig
from octavo.nn import rotary_table

__all__ = ["random_llama"]


def random_llama(session: Session, *, layers: int | None = None) -> Llama:
    """A Llama of BF16 parameters drawn on the device; the head shares the embedding's weight."""
    size = session.sizes.model
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_layers=layers or size.layers,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        max_positions=size.length,
        rope_theta=500000.0,
        tie_embeddings=True,
    )
    with torch.device("meta"):
        model = Llama(config)
    model.to(torch.bfloat16).to_empty(device=session.device)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.cos, model.model.sin = rotary_table(
        config.head_dim, config.max_positions, config.rope_theta, device=session.device
    )
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else nn.init.ones_(parameter)
    return model
