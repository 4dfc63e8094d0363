"""``octavo.nn.TransformerLayer``: attention and MLP around a residual stream.

| arrangement            | y                                                              |
|------------------------|----------------------------------------------------------------|
| pre-norm (default)     | h = x + attention(norm(x));  y = h + mlp(norm(h))              |
| pre-norm, parallel     | y = x + attention(norm(x)) + mlp(norm'(x))                     |
| post-norm              | h = norm(x + attention(x));  y = norm(h + mlp(h))              |

A decoder layer adds ``cross_attention`` between the two, arranged alike. The residual stream keeps the dtype of x:
under ``torch.autocast`` an FP32 stream stays FP32. Nothing follows the last layer of a pre-norm stack; put a norm
there.

References: Vaswani et al., arXiv 1706.03762 (post-norm, decoder); Xiong et al., arXiv 2002.04745 (pre-norm); Chowdhery
et al., arXiv 2204.02311, section 2 (parallel).
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.errors import ConfigError
from octavo.nn.activations import ACTIVATIONS
from octavo.nn.arguments import NormOptions, check_choice, check_probability, check_sizes, linear_options
from octavo.nn.kv_cache import KVCache
from octavo.nn.layernorm_mlp import LayerNormMLP
from octavo.nn.multihead import MultiheadAttention
from octavo.nn.norms import norm_layer
from octavo.recipes import Recipe

__all__ = ["TransformerLayer"]


class TransformerLayer(nn.Module):
    """One layer of a transformer, its linear layers in FP8.

    Args:
        hidden_size: width of the residual stream, H.
        ffn_hidden_size: width inside the MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``; None is ``num_heads``.
        head_dim: width of one head, D; None is hidden_size / num_heads.
        layer_type: "encoder", or "decoder" with cross-attention to an encoder's output. A decoder-only model is made of
            causal "encoder" layers.
        causal: whether a position sees only itself and those before.
        window: see ``DotProductAttention``.
        activation: of the MLP, a name of ``octavo.nn.activations``.
        normalization: "layernorm" or "rmsnorm".
        norm_position: "pre" or "post".
        parallel: attention and MLP read the same x (pre-norm encoders).
        eps: of the norms.
        zero_centered: store the norms' weights as w - 1.
        qk_norm: RMSNorm of every query head and every key head.
        bias: whether the linear layers have biases.
        dropout: of what is added to the residual stream, in training.
        attention_dropout: of the attention probabilities, in training.
        recipe: of the linear layers, a preset's name or a recipe.
        attention_recipe: of the products of attention, see ``DotProductAttention``.
        manual_scale_updates: see ``octavo.nn.Linear``.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ConfigError: an argument out of range, heads that do not divide, or ``parallel`` with a decoder or post-norm.

    Example:
        >>> layer = TransformerLayer(32, 64, 4, normalization="rmsnorm", activation="swiglu", recipe="rowwise")
        >>> layer(torch.randn(2, 5, 32), padding=torch.tensor([5, 3])).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        layer_type: str = "encoder",
        causal: bool = True,
        window: int | None = None,
        activation: str = "gelu",
        normalization: str = "layernorm",
        norm_position: str = "pre",
        parallel: bool = False,
        eps: float = 1e-5,
        zero_centered: bool = False,
        qk_norm: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        recipe: str | Recipe = "tensorwise",
        attention_recipe: str | Recipe | None = None,
        manual_scale_updates: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(ffn_hidden_size=ffn_hidden_size)
        check_choice("activation", activation, ACTIVATIONS)
        check_probability("dropout", dropout)
        _check_arrangement(layer_type, norm_position, parallel)
        options = linear_options(recipe, manual_scale_updates, device, dtype)
        before, after = normalization, "none"
        if norm_position == "post":
            before, after = after, before
        inner: NormOptions = {"normalization": before, "eps": eps, "zero_centered": zero_centered}
        outer: NormOptions = {"normalization": after, "eps": eps, "zero_centered": zero_centered}
        super().__init__()
        self.parallel, self.dropout = parallel, dropout
        attention = partial(  # checks the rest before it builds anything
            MultiheadAttention,
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            input_layernorm=True,
            qk_norm=qk_norm,
            dropout=attention_dropout,
            attention_recipe=attention_recipe,
            **inner,
            **options,
        )
        decodes = layer_type == "decoder"
        self.self_attention = attention(causal=causal, window=window)
        self.cross_attention = attention(cross_attention=True) if decodes else None
        self.mlp = LayerNormMLP(hidden_size, ffn_hidden_size, activation=activation, bias=bias, **inner, **options)
        output_norm = partial(norm_layer, hidden_size, **outer, device=device, dtype=dtype)
        self.attention_norm = output_norm()
        self.cross_attention_norm = output_norm() if decodes else None
        self.mlp_norm = output_norm()

    def forward(
        self,
        x: Tensor,
        *,
        encoder_output: Tensor | None = None,
        padding: Tensor | None = None,
        encoder_padding: Tensor | None = None,
        mask: Tensor | None = None,
        rotations: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Add what this layer finds to x.

        Args:
            x: the residual stream, [B, T, H].
            encoder_output: [B, S, H], for a decoder.
            padding: of x (and of what the cache holds): bool [B, T], True for real keys, or lengths [B].
            encoder_padding: of ``encoder_output``.
            mask: of self-attention, [T, T] or [B, heads, T, T], bool (True may be seen) or added to the scores.
            rotations: cosine and sine [positions, D] of ``octavo.nn.rotary_table``, for self-attention.
            cache: keys and values of earlier positions, ``layer.self_attention.new_cache(...)``.

        Returns:
            [B, T, H] in x's dtype.

        Raises:
            ConfigError: shapes that do not go together; an encoder's output without a decoder, or the reverse.
        """
        if (encoder_output is not None) != (self.cross_attention is not None):
            raise ConfigError('encoder_output goes with layer_type="decoder"; give both or neither')
        if encoder_padding is not None and encoder_output is None:
            raise ConfigError("encoder_padding goes with encoder_output; give both or neither")
        if self.cross_attention is not None:  # before self-attention appends to the cache
            self.cross_attention.check_inputs(x, encoder_output=encoder_output, padding=encoder_padding)
        found = self.self_attention(x, padding=padding, mask=mask, rotations=rotations, cache=cache)
        hidden = self.attention_norm(self._add(x, found))
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            found = self.cross_attention(hidden, encoder_output=encoder_output, padding=encoder_padding)
            hidden = self.cross_attention_norm(self._add(hidden, found))
        y: Tensor = self.mlp_norm(self._add(hidden, self.mlp(x if self.parallel else hidden)))
        return y

    def _add(self, residual: Tensor, found: Tensor) -> Tensor:
        return (residual + F.dropout(found, self.dropout, self.training)).to(residual.dtype)


def _check_arrangement(layer_type: str, norm_position: str, parallel: bool) -> None:
    check_choice("layer_type", layer_type, ("encoder", "decoder"))
    check_choice("norm_position", norm_position, ("pre", "post"))
    if parallel and (layer_type, norm_position) != ("encoder", "pre"):
        raise ConfigError(
            "parallel attention and MLP need layer_type='encoder' and norm_position='pre', "
            f"not {layer_type!r} and {norm_position!r}"
        )
