"""Mixtures of experts of transformers with two layers, and a tokenizer."""

import warnings
from typing import Any

import torch

from octavo.convert import unfuse_experts
from octavo.language_model import LanguageModel
from octavo.text.tokenizer import train_tokenizer

VOCABULARY, CONTEXT, HIDDEN, INTERMEDIATE, EXPERTS = 300, 64, 64, 32, 4
SIZES = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS, "head_dim": 32},
    "Qwen3Moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    },
    "Qwen2Moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 40,
    },
    "DeepseekV3": {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "Ernie4_5_Moe": {
        "moe_num_experts": EXPERTS,
        "moe_intermediate_size": INTERMEDIATE,
        "moe_k": 2,
        "moe_layer_start_index": 1,
    },
    "Phimoe": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": 2},
    "GptOss": {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default"},
    },
}


def mixture(name: str, **settings: Any) -> LanguageModel:
    """A model with weights large enough that formats differ; ``settings`` are of its configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES | HEADS | MODELS[name] | settings)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    tokenizer = train_tokenizer(["some text, some more text"] * 3, vocab_size=VOCABULARY)
    return LanguageModel(model=model, tokenizer=tokenizer, context=CONTEXT, source="a test")


def starving(expert: int = 2) -> LanguageModel:
    """A Mixtral with a layer for each expert, whose second router never selects one of them."""
    made = mixture("Mixtral")
    router = made.model.get_submodule("model.layers.1.mlp.gate")

    def away(_: object, __: object, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, index = outputs
        return logits, weights, torch.where(index == expert, EXPERTS, index)

    router.register_forward_hook(away)
    unfuse_experts(made.model)
    return made
