"""Attention in FP8: both products of softmax(Q K^T · scale + mask) V multiply codes; the softmax stays in FP32.

    scores = Q [T, D] @ K.T [D, S]        for each sequence and key head
    P      = softmax(scores · scale + mask)
    output = P [T, S] @ V [S, V]

Each product is the linear layer of a mixture (:func:`octavo.functional.fp8_grouped_linear`) whose experts are the
sequences' key heads: K, or the transpose of V, is an expert's weight, and the rows of all query heads that share it are
its tokens. So there are six GEMMs in forward and backward, cast by the recipe: ``tensorwise`` has a scale for each
sequence and key head, ``rowwise`` for each position, ``blockwise`` and ``mxfp8`` for each block.

Scores, probabilities and the gradients between the products are FP32 tensors [B, heads, T, S]: this costs memory that
flash attention does not need. Backward of the softmax is dS = P · (dP - δ) with δ = Σ P · dP, summed in FP32 from the
same P and dP, so that each row of dS adds up to zero. Flash attention computes δ = Σ dO · O instead: where O was
rounded, errors of δ have one sign, which the weights of queries and keys accumulate until training fails (Qiu and Yao,
arXiv 2510.04212).

References: Vaswani et al., arXiv 1706.03762, equation 1; Shah et al., arXiv 2407.08608, section 3.3 (FP8).
"""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.errors import ConfigError
from octavo.functional.grouped_linear import fp8_grouped_linear
from octavo.recipes import Recipe
from octavo.scaling import ExpertsWatch, LayerScaling

__all__ = ["AttentionWatch", "check_attention_recipe", "check_attention_shapes", "fp8_attention"]


class AttentionWatch(Protocol):
    """Observer of an attention in FP8, such as the doctor."""

    @property
    def scores(self) -> ExpertsWatch:
        """Inspects the casts of Q (input), K (weight) and the scores' gradient, of all key heads together."""

    @property
    def output(self) -> ExpertsWatch:
        """Inspects the casts of P, V and the output's gradient."""

    def softmax(self, logits: Tensor, probabilities: Tensor, scale: float) -> None:
        """Inspect scores · scale before the mask, and probabilities, [B, heads, T, S]."""
        ...


def check_attention_recipe(recipe: Recipe) -> None:
    """Refuse a recipe whose scales attention does not have.

    Example:
        >>> from octavo import recipes
        >>> check_attention_recipe(recipes.get("delayed"))
        Traceback (most recent call last):
        ...
        octavo.errors.ConfigError: attention takes its scales from its tensors; recipe 'delayed' has delayed or ...
    """
    if recipe.is_delayed or recipe.has_static_input:
        raise ConfigError(
            f"attention takes its scales from its tensors; recipe {recipe.name!r} has delayed or static ones: use "
            "'tensorwise', 'rowwise', 'blockwise' or 'mxfp8'"
        )


def check_attention_shapes(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Refuse tensors that do not go together; a batch, positions and widths of 0 may be.

    Example:
        >>> check_attention_shapes(torch.zeros(1, 5, 3, 8), torch.zeros(1, 7, 2, 8), torch.zeros(1, 7, 2, 8))
        Traceback (most recent call last):
        ...
        octavo.errors.ConfigError: attention takes keys and values of one shape, with the queries' batch and width, ...
    """
    shapes = f"{tuple(queries.shape)}, {tuple(keys.shape)} and {tuple(values.shape)}"
    if not queries.ndim == keys.ndim == values.ndim == 4:
        raise ConfigError(f"attention takes queries, keys and values [B, T, heads, D], not {shapes}")
    alike = keys.shape[:3] == values.shape[:3] and keys.shape[0] == queries.shape[0]
    divides = keys.shape[2] > 0 and queries.shape[2] % keys.shape[2] == 0
    if not alike or keys.shape[3] != queries.shape[3] or not divides:
        raise ConfigError(
            "attention takes keys and values of one shape, with the queries' batch and width, and a number of heads "
            f"that divides theirs, not {shapes}"
        )


def fp8_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    recipe: Recipe,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    watch: AttentionWatch | None = None,
) -> Tensor:
    """Compute softmax(Q K^T · scale + mask) V with the casts and GEMMs of ``recipe``; no size is 0.

    Args:
        queries: [B, T, heads, D].
        keys: [B, S, kv, D], of which each head serves heads / kv query heads that stand side by side.
        values: [B, S, kv, V].
        recipe: of both products, with dynamic scales.
        mask: [T, S] or [B, heads, T, S], any of these 1; bool (True may be seen) or floating, added to the scores.
            Queries that see nothing give zeros. They, and keys that nothing sees, have no part in a scale; queries at
            padded positions that see keys do. Only False and -inf hide a key so: one behind a large finite negative,
            such as -1e9, has a part in scales.
        dropout: of the probabilities.
        scale: of the scores; None is 1 / sqrt(D).
        watch: inspects the call.

    Returns:
        [B, T, heads, V] in the queries' dtype.

    Raises:
        ConfigError: shapes that do not go together, or queries or keys without elements.

    Example:
        >>> from octavo import recipes
        >>> values = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1)
        >>> y = fp8_attention(values, torch.zeros(1, 2, 1, 1), values, recipes.get("tensorwise"))
        >>> torch.allclose(y, torch.full((1, 2, 1, 1), 1.5))
        True
    """
    check_attention_shapes(queries, keys, values)
    if not (queries.numel() and keys.numel()):
        raise ConfigError(
            f"attention in FP8 takes no size 0, not queries {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "octavo.nn.DotProductAttention takes such tensors"
        )
    (batch, asked, heads, width), kv = queries.shape, keys.shape[2]
    known, scale = keys.shape[1], 1 / math.sqrt(width) if scale is None else scale
    q = queries.float()
    visible = sees = None
    if mask is not None:
        visible = mask if mask.dtype is torch.bool else mask != -math.inf
        visible = visible if visible.ndim == 4 else visible[None, None]
        sees, seen = visible.any(dim=-1, keepdim=True), visible.any(dim=1).any(dim=1)
        q = q.masked_fill(~sees.transpose(1, 2), 0)
        keys, values = (each.masked_fill(~seen[:, :, None, None], 0) for each in (keys, values))
    q = q.unflatten(2, (kv, heads // kv)).permute(0, 2, 3, 1, 4).reshape(-1, width)  # [B · heads · T, D]
    offsets = torch.arange(batch * kv + 1) * (heads // kv * asked)
    scores = _product(q, keys.transpose(1, 2).flatten(0, 1), offsets, recipe, None if watch is None else watch.scores)
    logits = scores.view(batch, heads, asked, known) * scale
    probabilities = _softmax(logits, mask, visible, sees)
    if watch is not None:
        watch.softmax(logits.detach(), probabilities.detach(), scale)
    p, v = F.dropout(probabilities, dropout).view(-1, known), values.permute(0, 2, 3, 1).flatten(0, 1)  # V^T
    out = _product(p, v, offsets, recipe, None if watch is None else watch.output)
    return out.view(batch, heads, asked, -1).transpose(1, 2).to(queries.dtype)


def _product(x: Tensor, weight: Tensor, offsets: Tensor, recipe: Recipe, watch: ExpertsWatch | None) -> Tensor:
    return fp8_grouped_linear(x, weight, None, offsets, recipe, scaling=LayerScaling(experts_watch=watch))


def _softmax(logits: Tensor, mask: Tensor | None, visible: Tensor | None, sees: Tensor | None) -> Tensor:
    """Probabilities; 0, and no gradient, where a query sees nothing."""
    if mask is None or visible is None or sees is None:
        return logits.softmax(dim=-1)
    if mask.is_floating_point():
        logits = logits + mask.masked_fill(mask == -math.inf, 0)
    return logits.masked_fill(sees & ~visible, -math.inf).softmax(dim=-1).masked_fill(~sees, 0)
