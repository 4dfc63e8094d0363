"""Transformer Engine's TransformerLayer."""

from typing import Any

import torch
from torch import Tensor

from octavo import nn as octavo_nn
from octavo.compat.transformer_engine.pytorch.arguments import (
    Initializer,
    activation_name,
    check_others,
    initialize,
    is_causal,
    normalization_name,
    visibility,
    window_of,
)
from octavo.compat.transformer_engine.pytorch.attention import (
    MaskGiven,
    batch_first,
    check_same_mask,
    rotations_of,
    rows_of,
    swap_unless_batch_first,
)
from octavo.compat.transformer_engine.pytorch.checkpoint_names import mlp_rows, read_names
from octavo.compat.transformer_engine.pytorch.microbatches import micro_batch
from octavo.compat.transformer_engine.pytorch.tensor_parallel import ParallelModule, TensorParallel
from octavo.errors import ConfigError

__all__ = ["TransformerLayer"]


class TransformerLayer(ParallelModule):
    """Attention and MLP around a residual stream, pre-norm.

    Hidden states are [S, B, H] unless ``attn_input_format="bshd"``. Both dropouts are 0.1 unless given.

    Args:
        hidden_size: width of the residual stream, H.
        ffn_hidden_size: width inside the MLP.
        num_attention_heads: query heads.
        num_gqa_groups: key and value heads; None is ``num_attention_heads``.
        layernorm_epsilon: of the norms.
        hidden_dropout: of the values added to the residual stream, in training.
        attention_dropout: of the attention probabilities, in training.
        init_method: of weights that read the residual stream; None is a normal distribution with standard deviation
            0.023.
        output_layer_init_method: of weights that write to the residual stream.
        kv_channels: width of one head; None is hidden_size / num_attention_heads.
        self_attn_mask_type: see :class:`DotProductAttention`.
        window_size: see :class:`DotProductAttention`.
        enc_dec_attn_mask_type: "no_mask" or "padding".
        parallel_attention_mlp: apply attention and MLP to the same input.
        layer_type: "encoder" or "decoder".
        zero_centered_gamma: store the norms' weights as w - 1.
        qkv_weight_interleaved: whether the fused weight of a checkpoint is interleaved.
        bias: whether the linear layers have biases.
        activation: see :class:`LayerNormMLP`.
        normalization: "LayerNorm" or "RMSNorm".
        attn_input_format: "sbhd" or "bshd".
        params_dtype: of the parameters.
        device: of the parameters; None is torch's default, not "cuda".
        others: see ``arguments.py``.

    Example:
        >>> layer = TransformerLayer(32, 64, 4, attn_input_format="bshd")
        >>> layer(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        *,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        attn_input_format: str = "sbhd",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        tensor_parallel = TensorParallel.taken(others)
        check_others("TransformerLayer", others)
        tensor_parallel.check_mode("TransformerLayer", set_parallel_mode=others.get("set_parallel_mode", False))
        causal = is_causal(self_attn_mask_type)
        _check_cross_mask(enc_dec_attn_mask_type)
        super().__init__()
        self.self_attn_mask_type, self.window_size = self_attn_mask_type, window_size
        self.enc_dec_attn_mask_type, self.batch_first = enc_dec_attn_mask_type, batch_first(attn_input_format)
        self.layer = octavo_nn.TransformerLayer(
            hidden_size,
            tensor_parallel.share("ffn_hidden_size", ffn_hidden_size),
            tensor_parallel.share("num_attention_heads", num_attention_heads),
            num_kv_heads=num_gqa_groups and tensor_parallel.share("num_gqa_groups", num_gqa_groups),
            head_dim=kv_channels or hidden_size // num_attention_heads,
            layer_type=layer_type,
            causal=causal,
            window=window_of(window_size, causal=causal),
            activation=activation_name(activation),
            normalization=normalization_name(normalization),
            parallel=parallel_attention_mlp,
            eps=layernorm_epsilon,
            zero_centered=zero_centered_gamma,
            bias=bias,
            dropout=hidden_dropout,
            attention_dropout=attention_dropout,
            recipe="bf16",
            device=device,
            dtype=params_dtype,
        )
        self.divide_layers(tensor_parallel, positions=1)
        initialize(self.layer, init_method, output_layer_init_method)
        rows = mlp_rows("layer.mlp.", "layernorm_mlp.")
        for name, source in (("self_attention", "self_attention"), ("cross_attention", "inter_attention")):
            if (attention := getattr(self.layer, name)) is not None:
                rows += rows_of(attention, f"layer.{name}.", f"{source}.", interleaved=qkv_weight_interleaved)
        read_names(self, rows)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskGiven = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: Tensor | None = None,
        *,
        enc_dec_attn_mask: MaskGiven = None,
        enc_dec_attn_mask_type: str | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        is_first_microbatch: bool | None = None,
        **others: Any,
    ) -> Tensor:
        """Apply the layer to hidden states, [S, B, H] or batch first.

        Args:
            hidden_states: [S, B, H], or batch first.
            attention_mask: mask of self-attention, of its mask type; True hides.
            self_attn_mask_type: mask type of this call, with the constructor's causality.
            window_size: None, or the constructor's.
            encoder_output: input of cross-attention in a decoder.
            enc_dec_attn_mask: mask of cross-attention.
            enc_dec_attn_mask_type: "no_mask" or "padding".
            rotary_pos_emb: angles [S, 1, 1, D].
            is_first_microbatch: see ``microbatches.py``.
            others: see ``arguments.py``.
        """
        check_others("TransformerLayer", others)
        mask_type = self_attn_mask_type or self.self_attn_mask_type
        check_same_mask(mask_type, self.self_attn_mask_type, window_size, self.window_size)
        cross_type = enc_dec_attn_mask_type or self.enc_dec_attn_mask_type
        _check_cross_mask(cross_type)
        with micro_batch(self, is_first_microbatch):
            y: Tensor = self.layer(
                swap_unless_batch_first(hidden_states, self.batch_first),
                encoder_output=None
                if encoder_output is None
                else swap_unless_batch_first(encoder_output, self.batch_first),
                encoder_padding=visibility(cross_type, enc_dec_attn_mask)["padding"],
                rotations=rotations_of(rotary_pos_emb),
                **visibility(mask_type, attention_mask),
            )
        return swap_unless_batch_first(y, self.batch_first)


def _check_cross_mask(mask_type: str) -> None:
    if mask_type not in ("no_mask", "padding"):
        raise ConfigError(f"enc_dec_attn_mask_type must be no_mask or padding, not {mask_type!r}")
