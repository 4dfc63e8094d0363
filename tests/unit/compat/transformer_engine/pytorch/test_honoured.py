"""Every argument that a module here names does what octavo's own does, and something: none is read and forgotten.

A module with one argument off its default is compared, in training, with octavo's module of the same weights and the
argument by octavo's name; and with itself at the default, from which it has to differ.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo import nn as octavo_nn
from octavo.compat.transformer_engine import pytorch as te

DTYPE = {"params_dtype": (torch.bfloat16, {"dtype": torch.bfloat16})}
NORM = {"zero_centered_gamma": (True, {"zero_centered": True})} | DTYPE
BEHIND_NORM = NORM | {
    "bias": (False, {"bias": False}),
    "normalization": ("RMSNorm", {"normalization": "rmsnorm"}),
}
ATTENTION = {
    "num_gqa_groups": (2, {"num_kv_heads": 2}),
    "kv_channels": (8, {"head_dim": 8}),
    "layernorm_epsilon": (0.5, {"eps": 0.5}),
    "window_size": ((2, 0), {"window": 2}),
}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

# Per module: sizes, options both sides have, {argument: (value, octavo's)}, and what other tests show.
HONOURED: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], dict[str, tuple[Any, Any]], set[str]]] = {
    "Linear": ((24, 40), {}, {}, DTYPE | {"bias": (False, {"bias": False})}, {"init_method"}),
    "LayerNorm": ((24,), {}, {}, NORM | {"eps": (0.5, {"eps": 0.5})}, {"hidden_size"}),
    "RMSNorm": ((24,), {}, {}, NORM | {"eps": (0.5, {"eps": 0.5})}, {"hidden_size"}),
    "LayerNormLinear": (
        (24, 40),
        {},
        {},
        BEHIND_NORM | {"eps": (0.5, {"eps": 0.5}), "return_layernorm_output": (True, {"return_norm_output": True})},
        {"init_method", "return_layernorm_output_gathered"},
    ),
    "LayerNormMLP": (
        (24, 40),
        {},
        {"activation": "gelu_tanh"},
        BEHIND_NORM | {"eps": (0.5, {"eps": 0.5}), "activation": ("reglu", {"activation": "reglu"})},
        {"init_method", "output_layer_init_method", "return_layernorm_output", "return_layernorm_output_gathered"},
    ),
    "MultiheadAttention": (
        (24, 4),
        {"attention_dropout": 0.0, "input_layernorm": True},
        {"input_layernorm": True},
        BEHIND_NORM
        | ATTENTION
        | {
            "attention_dropout": (0.5, {"dropout": 0.5}),
            "input_layernorm": (False, {"input_layernorm": False}),
            "attn_mask_type": ("no_mask", {"causal": False}),
        },
        {
            "init_method",
            "output_layer_init_method",
            "attention_type",
            "return_layernorm_output",
            "qkv_weight_interleaved",
            "qkv_format",
        },
    ),
    "TransformerLayer": (
        (24, 40, 4),
        NO_DROPOUT,
        {"activation": "gelu_tanh"},
        BEHIND_NORM
        | ATTENTION
        | {
            "hidden_dropout": (0.5, {"dropout": 0.5}),
            "attention_dropout": (0.5, {"attention_dropout": 0.5}),
            "self_attn_mask_type": ("no_mask", {"causal": False}),
            "parallel_attention_mlp": (True, {"parallel": True}),
            "layer_type": ("decoder", {"layer_type": "decoder"}),
            "activation": ("swiglu", {"activation": "swiglu"}),
        },
        {
            "init_method",
            "output_layer_init_method",
            "qkv_weight_interleaved",
            "attn_input_format",
            "enc_dec_attn_mask_type",
        },
    ),
}
SIZES = {"in_features", "out_features", "normalized_shape", "hidden_size", "ffn_hidden_size", "num_attention_heads"}
CASES = [(kind, argument) for kind, row in HONOURED.items() for argument in row[3]]


@pytest.mark.parametrize("kind", HONOURED)
def test_every_argument_is_tested_here(kind):
    *_, honoured, elsewhere = HONOURED[kind]
    named = inspect.signature(getattr(te, kind)).parameters.keys() - SIZES - {"others", "device"}
    assert named == (honoured.keys() | elsewhere) - SIZES


def _built(kind: str, **options: Any) -> nn.Module:
    sizes, base, *_ = HONOURED[kind]
    module: nn.Module = getattr(te, kind)(*sizes, **(base | options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module


def _octavos(kind: str, module: nn.Module, **options: Any) -> nn.Module:
    """octavo's module with the weights of ``module``."""
    sizes, _, base, *_ = HONOURED[kind]
    recipe = {} if kind in ("LayerNorm", "RMSNorm") else {"recipe": "bf16"}
    made: nn.Module = getattr(octavo_nn, kind)(*sizes, **(base | recipe | options))
    inner = next((getattr(module, name) for name in ("linear", "layer", "attention") if hasattr(module, name)), module)
    made.load_state_dict(inner.state_dict())
    return made


def _run(module: nn.Module, *, sequence_first: bool, decodes: bool) -> list[Tensor]:
    """What comes out, batch first."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(module.parameters()).dtype
    x, memory = torch.randn(2, 2, 5, 24, generator=generator).to(dtype)
    options = {"encoder_output": memory.transpose(0, 1) if sequence_first else memory} if decodes else {}
    torch.manual_seed(2)
    result = module(x.transpose(0, 1) if sequence_first else x, **options)
    outputs = result if isinstance(result, tuple) else (result,)
    return [y.transpose(0, 1) if sequence_first else y for y in outputs]


def _same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(
        one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize(("kind", "argument"), CASES)
def test_an_argument_does_what_octavos_does(kind, argument):
    value, octavos = HONOURED[kind][3][argument]
    module = _built(kind, **{argument: value})
    swaps, decodes = kind in ("MultiheadAttention", "TransformerLayer"), value == "decoder"
    y = _run(module, sequence_first=swaps, decodes=decodes)
    expected = _run(_octavos(kind, module, **octavos), sequence_first=False, decodes=decodes)
    assert _same(y, expected)
    assert not _same(y, _run(_built(kind), sequence_first=swaps, decodes=False)), "it changes nothing"
    if argument == "params_dtype":
        assert {parameter.dtype for parameter in module.parameters()} == {value}


@pytest.mark.parametrize("kind", HONOURED)
def test_the_device_is_the_parameters(kind):
    sizes, base, *_ = HONOURED[kind]
    module = getattr(te, kind)(*sizes, **base, device="meta")
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}


DOT_PRODUCT: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention_dropout": (0.5, {"dropout": 0.5}),
    "softmax_scale": (0.1, {"scale": 0.1}),
    "attn_mask_type": ("no_mask", {"causal": False}),
    "window_size": ((1, 0), {"window": 1}),
}


def test_none_of_dot_product_attention_is_forgotten_here():
    named = inspect.signature(te.DotProductAttention).parameters.keys() - SIZES - {"others"}
    assert named == DOT_PRODUCT.keys() | {"kv_channels", "num_gqa_groups", "attention_type", "qkv_format"}


@pytest.mark.parametrize("argument", DOT_PRODUCT)
def test_an_argument_of_dot_product_attention_does_what_octavos_does(argument):
    value, octavos = DOT_PRODUCT[argument]
    operands = torch.randn(3, 2, 5, 4, 8)
    results = []
    changed: dict[str, Any] = {argument: value}
    for attention in (
        te.DotProductAttention(4, 8, qkv_format="bshd", **changed),
        octavo_nn.DotProductAttention(**octavos),
        te.DotProductAttention(4, 8, qkv_format="bshd"),
    ):
        torch.manual_seed(2)
        results.append(attention(*operands).reshape(2, 5, 32))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
