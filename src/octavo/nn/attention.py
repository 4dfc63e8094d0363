"""Attention of given queries, keys and values: softmax(Q K^T · scale + mask) V, in high precision or in FP8.

| tensor       | shape             | note                                                                   |
|--------------|-------------------|------------------------------------------------------------------------|
| queries      | [B, T, heads, D]  | the last T of the S positions, if causal or in a window                |
| keys, values | [B, S, kv, D]     | one key head serves heads / kv query heads that stand side by side     |
| padding      | [B, S] or [B]     | bool: True is a real key; integers: how many keys, from the first, are |
|              |                   | (0 to S; on a GPU they are not checked: too many are all, < 0 none)  |
| mask         | [T, S] or 4-D     | bool: True may be seen; floating: added to the scores                  |
| result       | [B, T, heads, D]  | in the queries' dtype (under ``torch.autocast``: its dtype)            |

A 4-D mask is [B, heads, T, S]. Any size of a mask may be 1. What a query may see is the intersection of all that is
given. A query that may see nothing gives zeros and takes no gradient. Torch's ``scaled_dot_product_attention`` does the
work; a mask is made only where its causal flag cannot say the same, since flags reach its fastest kernels. With a
recipe, :func:`octavo.functional.fp8_attention` multiplies in FP8 instead.

References: Vaswani et al., arXiv 1706.03762, equation 1; Ainslie et al., arXiv 2305.13245 (grouped heads); Beltagy et
al., arXiv 2004.05150, section 3.1 (sliding window).
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo import recipes
from octavo.autocast import active_recipe
from octavo.errors import ConfigError
from octavo.functional import AttentionWatch, check_attention_recipe, check_attention_shapes, fp8_attention
from octavo.kernels import needs_widening
from octavo.nn.arguments import check_probability, check_whole
from octavo.nn.scaled_layer import in_autocast_dtype
from octavo.numerics.cast import is_eager_cpu
from octavo.recipes import Recipe

__all__ = ["DotProductAttention", "attend", "check_visibility"]


class DotProductAttention(nn.Module):
    """softmax(Q K^T · scale + mask) V.

    Args:
        causal: a query sees its own position and those before.
        window: a query sees its own position and this many before (and after, if not causal); None sees all.
        dropout: of the attention probabilities, in training.
        scale: of the scores; None is 1 / sqrt(D).
        recipe: of both products, a preset's name or a recipe with dynamic scales; None runs them in high precision, as
            ``octavo.autocast(enabled=False)`` does with any.

    Raises:
        ConfigError: a negative ``window``, a ``dropout`` outside 0 ≤ p < 1, a ``scale`` that is not positive, a recipe
            with delayed or static scales.

    Example:
        >>> attention = DotProductAttention(window=4)
        >>> queries, keys, values = torch.randn(2, 7, 8, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
        >>> attention(queries, keys, values, padding=torch.tensor([7, 5])).shape
        torch.Size([2, 7, 8, 16])
    """

    watch: AttentionWatch | None = None  # set for the steps that the doctor inspects

    def __init__(
        self,
        *,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        recipe: str | Recipe | None = None,
    ) -> None:
        check_whole("window", window, least=0)
        check_probability("dropout", dropout)
        if scale is not None and not 0 < scale < math.inf:
            raise ConfigError(f"scale must be a positive number, or None for 1 / sqrt(D), not {scale!r}")
        super().__init__()
        self.causal, self.window, self.dropout, self.scale = causal, window, dropout, scale
        self.set_recipe(recipe)

    def set_recipe(self, recipe: str | Recipe | None) -> None:
        """Run both products with another recipe from now on; None runs them in high precision."""
        self.recipe = None if recipe is None else recipes.get(recipe)
        if self.recipe is not None:
            check_attention_recipe(self.recipe)

    def recipe_now(self) -> Recipe | None:
        """The recipe of this call; None in high precision. ``octavo.autocast`` can only switch it off."""
        own = self.recipe
        return None if own is None or own.is_high_precision or active_recipe(own).is_high_precision else own

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """See the module's table for shapes.

        Raises:
            ConfigError: shapes that do not go together, lengths beyond the keys, or more causal queries than keys.
        """
        return attend(
            queries,
            keys,
            values,
            causal=self.causal,
            window=self.window,
            padding=padding,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            scale=self.scale,
            recipe=self.recipe_now(),
            watch=self.watch,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        return f"causal={self.causal}, window={self.window}, dropout={self.dropout}, scale={self.scale}{recipe}"


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    recipe: Recipe | None = None,
    watch: AttentionWatch | None = None,
) -> Tensor:
    """Functional form of :class:`DotProductAttention`.

    Example:
        >>> values = torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1)
        >>> attend(torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1), values, causal=True).flatten().tolist()
        [1.0, 2.0]
    """
    check_attention_shapes(queries, keys, values)
    check_visibility(
        padding, mask, batch=keys.shape[0], heads=queries.shape[2], asked=queries.shape[1], known=keys.shape[1]
    )
    asked, known = queries.shape[1], keys.shape[1]
    if causal and asked > known:
        raise ConfigError(f"causal queries are the last of the keys' positions; {asked} are more than {known} keys")
    sees_all = window is None and padding is None and mask is None
    in_fp8 = recipe is not None and queries.numel() > 0 and keys.numel() > 0
    if sees_all and causal and asked == known and not in_fp8:
        return _attend(queries, keys, values, None, causal=True, dropout=dropout, scale=scale)
    if not (sees_all and (not causal or asked == 1)):
        visible = _visible(queries, keys, causal=causal, window=window, padding=padding)
        mask = visible if mask is None else _intersection(visible, mask)
    if recipe is not None and in_fp8:
        queries, keys, values = (in_autocast_dtype(each) for each in (queries, keys, values))
        return fp8_attention(queries, keys, values, recipe, mask=mask, dropout=dropout, scale=scale, watch=watch)
    return _attend(queries, keys, values, mask, causal=False, dropout=dropout, scale=scale)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention; widened to FP32 and rounded once where this CPU has no instructions for the values' dtype."""
    attention = partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=queries.shape[2] != keys.shape[2],
    )
    q, k, v = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    if not needs_widening(values):
        return attention(q, k, v, _additive(mask, q.dtype)).transpose(1, 2)
    with torch.autocast("cpu", enabled=False):  # it would narrow the operands again
        result = attention(q.float(), k.float(), v.float(), _additive(mask, torch.float32))
    return result.to(values.dtype).transpose(1, 2)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A floating mask in the scores' dtype; a bool one as it is."""
    return mask.to(dtype) if mask is not None and mask.is_floating_point() else mask


def _visible(
    queries: Tensor, keys: Tensor, *, causal: bool, window: int | None, padding: Tensor | None
) -> Tensor | None:
    """Mask of the keys that a query attends to: bool, broadcast to [B, heads, T, S]; None for all."""
    asked, known = queries.shape[1], keys.shape[1]
    key_at = torch.arange(known, device=queries.device)
    distance = torch.arange(known - asked, known, device=queries.device)[:, None] - key_at  # [T, S]
    visible = None
    if window is not None:
        visible = distance <= window if causal else distance.abs() <= window
    if causal:
        visible = distance >= 0 if visible is None else visible & (distance >= 0)
    if padding is not None:
        real = padding if padding.dtype is torch.bool else key_at < padding[:, None]
        real = real[:, None, None, :]
        visible = real if visible is None else visible & real
    return visible


def _intersection(visible: Tensor | None, mask: Tensor) -> Tensor:
    if visible is None:
        return mask
    return visible & mask if mask.dtype is torch.bool else torch.where(visible, mask, -math.inf)


def check_visibility(
    padding: Tensor | None, mask: Tensor | None, *, batch: int, heads: int, asked: int, known: int
) -> None:
    """Refuse padding or a mask that does not fit B, heads, T and S.

    Example:
        >>> check_visibility(torch.tensor([7]), None, batch=1, heads=4, asked=5, known=5)
        Traceback (most recent call last):
        ...
        octavo.errors.ConfigError: lengths must be 0 to 5, the number of keys, not [7]
    """
    if padding is not None and not _is_padding(padding, batch, known):
        raise ConfigError(
            f"padding must be bool [{batch}, {known}], True for real keys, or {batch} integer lengths, "
            f"not {padding.dtype} {tuple(padding.shape)}"
        )
    if padding is not None and padding.dtype is not torch.bool and _are_outside(padding, known):
        raise ConfigError(f"lengths must be 0 to {known}, the number of keys, not {padding.tolist()}")
    if mask is not None and not _is_mask(mask, (batch, heads, asked, known)):
        raise ConfigError(
            f"an attention mask must be bool or floating, [{asked}, {known}] or [{batch}, {heads}, {asked}, {known}] "
            f"([T, S] or [B, heads, T, S], any of them 1), not {mask.dtype} {tuple(mask.shape)}"
        )


def _is_padding(padding: Tensor, batch: int, known: int) -> bool:
    shape = (batch, known) if padding.dtype is torch.bool else (batch,)
    return not (padding.is_floating_point() or padding.is_complex()) and tuple(padding.shape) == shape


def _are_outside(lengths: Tensor, known: int) -> bool:
    return is_eager_cpu(lengths) and bool(((lengths < 0) | (lengths > known)).any())


def _is_mask(mask: Tensor, sizes: tuple[int, int, int, int]) -> bool:
    fits = all(given in (1, size) for given, size in zip(mask.shape, sizes[-mask.ndim :], strict=False))
    return mask.ndim in (2, 4) and fits and (mask.dtype is torch.bool or mask.is_floating_point())
