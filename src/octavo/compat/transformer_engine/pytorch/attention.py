"""Transformer Engine's attention modules.

Hidden states are [S, B, H] ("sbhd", the default) or [B, S, H] ("bshd"). Give the format: a batch-first tensor would
silently be read as sequence-first. True in a mask hides a key.
"""

from typing import Any

import torch
from torch import Tensor

from octavo import nn as octavo_nn
from octavo.compat.transformer_engine.pytorch.arguments import (
    Initializer,
    check_others,
    initialize,
    is_causal,
    normalization_name,
    visibility,
    window_of,
)
from octavo.compat.transformer_engine.pytorch.checkpoint_names import ParameterRow, attention_rows, read_names
from octavo.compat.transformer_engine.pytorch.microbatches import micro_batch
from octavo.compat.transformer_engine.pytorch.tensor_parallel import ParallelModule, TensorParallel
from octavo.errors import ConfigError
from octavo.nn.attention import attend

__all__ = [
    "DotProductAttention",
    "MultiheadAttention",
    "batch_first",
    "check_same_mask",
    "rotations_of",
    "rows_of",
    "swap_unless_batch_first",
]

MaskGiven = Tensor | tuple[Tensor, ...] | None


class DotProductAttention(ParallelModule):
    """softmax(Q K^T · scale + mask) V for queries, keys and values [S, B, heads, D], in high precision.

    Args:
        num_attention_heads: query heads.
        kv_channels: width of a head, D; has no effect.
        num_gqa_groups: key and value heads; has no effect.
        attention_dropout: of the probabilities, in training.
        qkv_format: "sbhd" or "bshd".
        attn_mask_type: "no_mask", "causal", "padding", "padding_causal", either causal one with "_bottom_right", or
            "arbitrary".
        window_size: (left, right), -1 is no limit.
        attention_type: "self" or "cross"; has no effect.
        softmax_scale: of the scores; None is 1 / sqrt(D).
        others: see ``arguments.py``.

    Example:
        >>> attention = DotProductAttention(4, 8)
        >>> attention(*torch.randn(3, 5, 2, 4, 8)).shape
        torch.Size([5, 2, 32])
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        *,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        **others: Any,
    ) -> None:
        TensorParallel.taken(others)  # without effect: the tensors have this rank's heads
        check_others("DotProductAttention", others)
        is_causal(attn_mask_type)
        batch_first(qkv_format)
        _is_cross(attention_type)
        super().__init__()
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.attention = octavo_nn.DotProductAttention(dropout=attention_dropout, scale=softmax_scale)
        read_names(self, [])

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: MaskGiven = None,
        *,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        **others: Any,
    ) -> Tensor:
        """Return [S, B, heads · D], or [B, S, heads · D]."""
        check_others("DotProductAttention", others)
        mask_type = attn_mask_type or self.attn_mask_type
        causal = is_causal(mask_type)
        is_batch_first = batch_first(qkv_format or self.qkv_format)
        q, k, v = (swap_unless_batch_first(x, is_batch_first) for x in (query_layer, key_layer, value_layer))
        if causal and "bottom_right" not in mask_type and q.shape[1] != k.shape[1]:
            raise ConfigError(
                f"octavo aligns different numbers of queries and keys at the last position, not at the first as "
                f"{mask_type!r}; use '{mask_type}_bottom_right'"
            )
        result = attend(
            q,
            k,
            v,
            causal=causal,
            window=window_of(window_size or self.window_size, causal=causal),
            dropout=self.attention.dropout if self.training else 0.0,
            scale=self.attention.scale,
            **visibility(mask_type, attention_mask),
        ).flatten(2)
        return swap_unless_batch_first(result, is_batch_first)


class MultiheadAttention(ParallelModule):
    """Multi-head attention with input and output projections.

    Args:
        hidden_size: of input and output, H.
        num_attention_heads: query heads.
        kv_channels: width of one head; None is hidden_size / num_attention_heads.
        attention_dropout: of the probabilities, in training.
        layernorm_epsilon: of the norm.
        init_method: of the query, key and value weights; None is a normal distribution of standard deviation 0.023.
        output_layer_init_method: of the output's weight.
        attn_mask_type: see :class:`DotProductAttention`.
        window_size: see :class:`DotProductAttention`.
        num_gqa_groups: key and value heads.
        return_layernorm_output: only False.
        input_layernorm: normalize the input first.
        attention_type: "self" or "cross".
        zero_centered_gamma: store the norm's weight as w - 1.
        qkv_weight_interleaved: whether the fused weight of a checkpoint is interleaved.
        bias: whether the linear layers have biases.
        normalization: "LayerNorm" or "RMSNorm".
        qkv_format: "sbhd" or "bshd".
        params_dtype: of the parameters.
        device: of the parameters; None is torch's default, not "cuda".
        others: see ``arguments.py``.

    Example:
        >>> MultiheadAttention(32, 4, qkv_format="bshd")(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        num_gqa_groups: int | None = None,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: str = "LayerNorm",
        qkv_format: str = "sbhd",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        tensor_parallel = TensorParallel.taken(others)
        check_others("MultiheadAttention", others)
        tensor_parallel.check_mode("MultiheadAttention", set_parallel_mode=others.get("set_parallel_mode", False))
        cross = _is_cross(attention_type)
        if return_layernorm_output:
            raise ConfigError("octavo's MultiheadAttention does not support return_layernorm_output=True; leave it out")
        causal = is_causal(attn_mask_type)
        super().__init__()
        self.batch_first, self.attn_mask_type, self.window_size = batch_first(qkv_format), attn_mask_type, window_size
        self.attention = octavo_nn.MultiheadAttention(
            hidden_size,
            tensor_parallel.share("num_attention_heads", num_attention_heads),
            num_kv_heads=num_gqa_groups and tensor_parallel.share("num_gqa_groups", num_gqa_groups),
            head_dim=kv_channels or hidden_size // num_attention_heads,
            bias=bias,
            input_layernorm=input_layernorm,
            normalization=normalization_name(normalization),
            eps=layernorm_epsilon,
            zero_centered=zero_centered_gamma,
            cross_attention=cross,
            causal=causal,
            window=window_of(window_size, causal=causal),
            dropout=attention_dropout,
            recipe="bf16",
            device=device,
            dtype=params_dtype,
        )
        self.divide_layers(tensor_parallel, positions=1)
        initialize(self.attention, init_method, output_layer_init_method)
        read_names(self, rows_of(self.attention, "attention.", "", interleaved=qkv_weight_interleaved))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskGiven = None,
        encoder_output: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        is_first_microbatch: bool | None = None,
        **others: Any,
    ) -> Tensor:
        """Return [S, B, H], or batch first.

        Args:
            hidden_states: input of the queries, and of keys and values in self-attention.
            attention_mask: mask of the mask type; True hides.
            encoder_output: input of keys and values in cross-attention.
            attn_mask_type: mask type of this call, with the constructor's causality.
            window_size: None, or the constructor's.
            rotary_pos_emb: angles [S, 1, 1, D].
            is_first_microbatch: see ``microbatches.py``.
            others: see ``arguments.py``.
        """
        check_others("MultiheadAttention", others)
        mask_type = attn_mask_type or self.attn_mask_type
        check_same_mask(mask_type, self.attn_mask_type, window_size, self.window_size)
        with micro_batch(self, is_first_microbatch):
            y: Tensor = self.attention(
                swap_unless_batch_first(hidden_states, self.batch_first),
                encoder_output=None
                if encoder_output is None
                else swap_unless_batch_first(encoder_output, self.batch_first),
                rotations=rotations_of(rotary_pos_emb),
                **visibility(mask_type, attention_mask),
            )
        return swap_unless_batch_first(y, self.batch_first)


def rows_of(
    attention: octavo_nn.MultiheadAttention, name: str, source: str, *, interleaved: bool
) -> list[ParameterRow]:
    """Rows of an attention layer's parameters in a checkpoint."""
    return attention_rows(
        name,
        source,
        cross=attention.cross_attention,
        heads=(attention.num_heads, attention.num_kv_heads),
        head_dim=attention.head_dim,
        interleaved=interleaved,
    )


def batch_first(qkv_format: str) -> bool:
    """Return True for tensors [B, S, ...]."""
    if qkv_format not in ("sbhd", "bshd"):
        raise ConfigError(f"octavo supports the formats sbhd and bshd, not {qkv_format!r}")
    return qkv_format == "bshd"


def swap_unless_batch_first(x: Tensor, is_batch_first: bool) -> Tensor:
    """Exchange the sequence and batch dimensions unless the caller's tensors are batch first, in either direction."""
    return x if is_batch_first else x.transpose(0, 1)


def check_same_mask(
    mask_type: str, built_with: str, window_size: tuple[int, int] | None, built_window: tuple[int, int] | None
) -> None:
    """Raise ConfigError for another causality or window than the constructor's."""
    if is_causal(mask_type) != is_causal(built_with) or window_size not in (None, built_window):
        raise ConfigError(
            f"this layer was built with mask type {built_with!r} and window {built_window}; give {mask_type!r} and "
            f"{window_size} to its constructor instead"
        )


def rotations_of(angles: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [S, D] of angles [S, 1, 1, D]."""
    if isinstance(angles, tuple):
        queries, keys = angles
        if queries is not keys:
            raise ConfigError("octavo rotates queries and keys by the same angles; give one tensor, not two")
        angles = queries
    if angles is None:
        return None
    rows = angles.flatten(0, 2) if angles.ndim == 4 else angles
    return rows.cos(), rows.sin()


def _is_cross(attention_type: str) -> bool:
    if attention_type not in ("self", "cross"):
        raise ConfigError(f"attention_type must be self or cross, not {attention_type!r}")
    return attention_type == "cross"
