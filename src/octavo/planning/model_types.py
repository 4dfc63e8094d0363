"""Whether a model is causal, and whether its MLPs have a gate, by the ``model_type`` of its configuration.

Types are listed exactly: ``dit`` is an encoder and ``ditto`` is not known. A type that is not listed is read where its
configuration says what it is, as those of most new decoders do, and refused elsewhere: three weights instead of two
are half more of an MLP, and a causal mask halves attention.
"""

import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError

__all__ = ["ENCODERS", "causal_and_gated"]


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


GATED_DECODERS = _types(
    """
    afmoe aria_text axk1 baichuan bamba bitnet chatglm cohere cohere2 cohere2_moe cwm dbrx deepseek deepseek_v2
    deepseek_v3 diffllama dots1 emu3_text_model ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo gemma gemma2
    gemma3 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm4v_text gpt_oss
    granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared grok-1 helium hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax internlm internlm2 internlm3 jamba kimi_k2 llama llama4 llama4_text mimo
    mimo_v2_flash minicpm minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
    mllama_text_model modernbert-decoder olmo olmo2 olmo3 olmo_hybrid olmoe phi3 phi4_multimodal phimoe qwen2 qwen2_moe
    qwen2_5_vl_text qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text
    qwen3_vl_text seed_oss smollm3 solar_open stablelm vaultgemma youtu zamba
    """
)
DECODERS = _types(
    """
    apertus arcee biogpt bloom codegen falcon fuyu gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj jais jais2
    mpt nanochat nemotron nemotron_h openai-gpt opt persimmon phi phi-msft refinedweb refinedwebmodel starcoder2
    """
)
GATED_ENCODERS = frozenset({"eurobert", "gte", "modernbert", "nomic_bert"})
ENCODERS = _types(
    """
    beit bert bert-generation camembert clip clip_text_model clip_vision_model data2vec-text data2vec-vision deberta
    deberta-v2 deit dinov2 dinov2_with_registers dinov3_vit dittransformer2dmodel electra ernie esm ibert ijepa layoutlm
    megatron-bert mpnet nystromformer rembert roberta roberta-prelayernorm roformer siglip siglip_text_model
    siglip_vision_model siglip2_text_model siglip2_vision_model videomae vit vit_mae vit_msn xlm-roberta xlm-roberta-xl
    """
)
GENERATES = re.compile(r"(?:ForCausalLM|LMHeadModel|ForConditionalGeneration)\b")  # of an encoder and decoder: refused
HAS_GATE = re.compile(r"silu|swish|glu")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def causal_and_gated(config: Mapping[str, Any], *, kind: str, name: str) -> tuple[bool, bool]:
    """Return whether a model is causal, and whether its MLPs have a gate.

    Args:
        config: of the model.
        kind: its type, in lower case.
        name: of the model, for messages.

    Raises:
        ConfigError: the type is not known, and the configuration does not say.

    Example:
        >>> (
        ...     causal_and_gated({}, kind="modernbert", name="x"),
        ...     causal_and_gated({"is_decoder": True}, kind="bert", name="x"),
        ... )
        ((False, True), (True, False))
    """
    is_decoder = config.get("is_decoder") is True
    is_gated = (
        kind in GATED_DECODERS | GATED_ENCODERS or config.get("use_swiglu_ffn", config.get("use_gated_mlp")) is True
    )
    if kind in GATED_DECODERS | DECODERS:
        return True, kind in GATED_DECODERS
    if kind in GATED_ENCODERS:
        return False, True
    if kind in ENCODERS:
        return is_decoder, is_gated  # BERT and its kin decode if they are told to
    has_gate = any(HAS_GATE.search(str(config.get(each)).lower()) for each in ACTIVATIONS)
    if has_gate and (is_decoder or GENERATES.search(str(config.get("architectures")))):
        return True, True
    raise ConfigError(
        f"the model type of {name!r}, {kind[:40] or 'none'}, is not known, and its configuration does not say that it "
        "is a causal decoder (architectures with ForCausalLM, or is_decoder) with gated MLPs (hidden_act silu); give "
        "the name of a model of its size"
    )
