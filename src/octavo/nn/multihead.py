"""``octavo.nn.MultiheadAttention``: projections, positions, attention, projection.

| tensor           | shape             | note                                                          |
|------------------|-------------------|---------------------------------------------------------------|
| x                | [B, T, H]         | the queries' positions                                        |
| encoder_output   | [B, S, H]         | cross attention reads its keys and values here                |
| qkv.linear       | [(heads + 2 kv)·D, H] | rows: all query heads, then all key heads, then all value heads |
| q.linear, kv     | [heads·D, H], [2 kv·D, H] | cross attention's; kv: key heads, then value heads    |
| out              | [H, heads·D]      |                                                               |

References: Vaswani et al., arXiv 1706.03762, section 3.2.2; Henry et al., arXiv 2010.04245 (queries and keys normalised
before their product).
"""

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.nn.arguments import (
    NormOptions,
    check_choice,
    check_eps,
    check_probability,
    check_sizes,
    check_whole,
    linear_options,
)
from octavo.nn.attention import DotProductAttention, check_visibility
from octavo.nn.kv_cache import KVCache
from octavo.nn.layernorm_linear import LayerNormLinear
from octavo.nn.linear import Linear
from octavo.nn.norms import NORMALIZATIONS, RMSNorm
from octavo.nn.rotary import rotate
from octavo.recipes import Recipe

__all__ = ["MultiheadAttention"]


class MultiheadAttention(nn.Module):
    """Self-attention over x, or cross-attention from x to an encoder's output.

    Queries, keys and values of self-attention come from one weight, so that their common input is quantized once.
    Attention itself runs in high precision unless ``attention_recipe`` says otherwise.

    Args:
        hidden_size: of input and output, H.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``; None is ``num_heads``.
        head_dim: width of one head, D; None is hidden_size / num_heads.
        bias: whether the linear layers have biases.
        input_layernorm: normalise x first (an encoder's output is read as it is).
        normalization: which norm that is, "layernorm" or "rmsnorm".
        eps: of the norms.
        zero_centered: store the norms' weights as w - 1.
        qk_norm: RMSNorm of every query head and every key head, before they are rotated.
        cross_attention: read keys and values from ``encoder_output``.
        causal: see ``DotProductAttention``; None is True for self-attention. Cross-attention has no common positions.
        window: see ``DotProductAttention``.
        dropout: of the attention probabilities, in training.
        recipe: of the linear layers, a preset's name or a recipe.
        attention_recipe: of the products of attention, see ``DotProductAttention``.
        manual_scale_updates: see ``octavo.nn.Linear``.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ConfigError: an argument out of range, or heads that do not divide.

    Example:
        >>> attention = MultiheadAttention(32, 4, num_kv_heads=2, input_layernorm=True, normalization="rmsnorm")
        >>> table = octavo.nn.rotary_table(head_dim=8, max_positions=16)
        >>> attention(torch.randn(2, 5, 32), rotations=table).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        input_layernorm: bool = False,
        normalization: str = "layernorm",
        eps: float = 1e-5,
        zero_centered: bool = False,
        qk_norm: bool = False,
        cross_attention: bool = False,
        causal: bool | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        recipe: str | Recipe = "tensorwise",
        attention_recipe: str | Recipe | None = None,
        manual_scale_updates: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_heads(hidden_size, num_heads, num_kv_heads, head_dim)
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_eps(eps)
        check_whole("window", window, least=0)
        check_probability("dropout", dropout)
        if cross_attention and (causal or window is not None):
            raise ConfigError("cross-attention has no common positions; leave out causal and window")
        options = linear_options(recipe, manual_scale_updates, device, dtype)
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_dim = head_dim or hidden_size // num_heads
        self.hidden_size, self.cross_attention = hidden_size, cross_attention
        q_size, kv_size = self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim
        norm: NormOptions = {
            "normalization": normalization if input_layernorm else "none",
            "eps": eps,
            "zero_centered": zero_centered,
        }
        if cross_attention:
            self.q = LayerNormLinear(hidden_size, q_size, bias=bias, **norm, **options)
            self.kv = Linear(hidden_size, kv_size, bias, **options)
        else:
            self.qkv = LayerNormLinear(hidden_size, q_size + kv_size, bias=bias, **norm, **options)
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, eps=eps, zero_centered=zero_centered, device=device, dtype=dtype)
            if qk_norm
            else nn.Identity()
            for _ in range(2)
        )
        self.attention = DotProductAttention(
            causal=not cross_attention if causal is None else causal,
            window=window,
            dropout=dropout,
            recipe=attention_recipe,
        )
        self.out: nn.Linear = Linear(q_size, hidden_size, bias, **options)

    def forward(
        self,
        x: Tensor,
        *,
        encoder_output: Tensor | None = None,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        rotations: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: [B, T, H].
            encoder_output: [B, S, H], for cross-attention.
            padding: bool [B, S], True for real keys, or lengths [B]; with a cache S counts all positions so far.
            mask: [T, S] or [B, heads, T, S], bool (True may be seen) or added to the scores.
            rotations: cosine and sine [positions, D] of ``octavo.nn.rotary_table``; None rotates nothing.
            cache: keys and values of earlier positions; x continues them, and its own are appended.

        Returns:
            [B, T, H] in x's dtype (under ``torch.autocast``: its dtype).

        Raises:
            ConfigError: shapes that do not go together, or an argument that this kind of attention does not take. The
                cache stays as it was then.
        """
        self.check_inputs(
            x, encoder_output=encoder_output, padding=padding, mask=mask, rotations=rotations, cache=cache
        )
        queries, keys, values = self._project(x, encoder_output)
        if rotations is not None:
            rows = _rows(rotations, 0 if cache is None else cache.position, x.shape[1])
            queries, keys = rotate(queries, *rows), rotate(keys, *rows)
            if values.requires_grad:  # kept as a part of the projection, they would keep all of it
                values = values.contiguous()
        if cache is not None:
            keys, values = (stored.to(queries.dtype) for stored in cache.append(keys, values))
        attended = self.attention(queries, keys, values, padding=padding, mask=mask)
        y: Tensor = self.out(attended.flatten(2))
        return y

    def new_cache(self, batch_size: int, max_positions: int) -> KVCache:
        """An empty cache for this layer, on its device and in its weights' dtype.

        Example:
            >>> attention = MultiheadAttention(32, 4)
            >>> cache = attention.new_cache(batch_size=1, max_positions=16)
            >>> with torch.no_grad():
            ...     y = [attention(x, cache=cache) for x in torch.randn(3, 1, 1, 32)]
            >>> cache.position
            3
        """
        codes = self.out.stored_codes() if isinstance(self.out, Linear) else None  # octavo.restore makes it nn.Linear
        dtype = self.out.weight.dtype if codes is None else codes.hp_dtype
        shape = batch_size, max_positions, self.num_kv_heads, self.head_dim
        return KVCache(*shape, device=self.out.weight.device, dtype=dtype)

    def _project(self, x: Tensor, encoder_output: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, heads, D], keys and values [B, S, kv, D]."""
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        if encoder_output is None:
            heads = self.qkv(x).unflatten(-1, (sum(counts), self.head_dim))
            queries, keys, values = heads.split(counts, dim=-2)
        else:
            queries = self.q(x).unflatten(-1, (self.num_heads, self.head_dim))
            keys, values = self.kv(encoder_output).unflatten(-1, (sum(counts[1:]), self.head_dim)).chunk(2, dim=-2)
        return self.q_norm(queries), self.k_norm(keys), values

    def check_inputs(
        self,
        x: Tensor,
        *,
        encoder_output: Tensor | None = None,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        rotations: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
    ) -> None:
        """Raise ConfigError where ``forward`` could not go on after it has appended to the cache."""
        for name, tensor in (("x", x), ("encoder_output", encoder_output)):
            if tensor is not None and (tensor.ndim != 3 or tensor.shape[-1] != self.hidden_size):
                raise ConfigError(f"{name} must be [B, T, {self.hidden_size}], not {tuple(tensor.shape)}")
        if (encoder_output is not None) != self.cross_attention:
            raise ConfigError(
                "encoder_output goes with cross_attention=True; "
                + ("hand it in" if self.cross_attention else "this layer attends to its own input")
            )
        if self.cross_attention and (rotations is not None or cache is not None):
            raise ConfigError("cross-attention has no common positions; leave out rotations and cache")
        if rotations is not None and not _are_tables(rotations, self.head_dim):
            raise ConfigError(f"rotations must be two tables [positions, {self.head_dim}]; make them with rotary_table")
        read = x if encoder_output is None else encoder_output
        known = read.shape[1] + (0 if cache is None else cache.position)
        check_visibility(padding, mask, batch=x.shape[0], heads=self.num_heads, asked=x.shape[1], known=known)


def _check_heads(hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> None:
    """Refuse heads that do not divide."""
    check_sizes(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    if head_dim is None and hidden_size % num_heads:
        raise ConfigError(
            f"num_heads must divide hidden_size, or head_dim be given; {num_heads} does not divide {hidden_size}"
        )
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ConfigError(f"num_kv_heads must divide num_heads; {num_kv_heads} does not divide {num_heads}")


def _are_tables(rotations: tuple[Tensor, Tensor], head_dim: int) -> bool:
    cos, sin = rotations
    return cos.ndim == 2 and cos.shape[1] == head_dim and cos.shape == sin.shape


def _rows(rotations: tuple[Tensor, Tensor], start: int, count: int) -> tuple[Tensor, Tensor]:
    """The table's rows of ``count`` positions from ``start`` on."""
    cos, sin = rotations
    if start + count > cos.shape[0]:
        raise ConfigError(
            f"the rotary table covers {cos.shape[0]} positions, and {start + count} are needed; "
            "make one with more max_positions"
        )
    return cos[start : start + count], sin[start : start + count]
