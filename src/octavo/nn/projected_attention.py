"""``ProjectedAttention``: ``nn.MultiheadAttention`` whose projections are linear layers, so that a recipe reaches them.

torch's attention multiplies by bare parameters: ``in_proj_weight`` [3 E, E], and the weight of an ``out_proj`` that it
never calls. Projected, the same object computes the same attention with two layers:

    q, k, v = in_proj(x)            one weight [3 E, E], the parameter that was in_proj_weight
    y       = out_proj(attention)

Parameters stay the same objects, and a ``state_dict`` has the same keys. Where keys or values come from elsewhere, the
layer multiplies each of the inputs and keeps its third. torch's fast paths read the parameters and so go round any
recipe. That of ``nn.TransformerEncoderLayer`` asks for an ``in_proj_bias``, which is None here. An
``nn.TransformerEncoder`` makes one nested tensor of padded sequences for that path, unless a parameter of its first
layer has a ``__torch_function__`` of its own: ``in_proj_weight`` has, and is nothing else.
"""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.errors import ConfigError

__all__ = ["ProjectedAttention", "is_plain", "join_projections", "split_projections"]

_KEPT_NAMES = {"in_proj.weight": "in_proj_weight", "in_proj.bias": "in_proj_bias"}


class _NoFastPath:
    """The ``in_proj_weight`` that ``nn.TransformerEncoder`` sees; see the module's docstring."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise ConfigError("in_proj_weight of a projected attention is no tensor; its weight is in_proj.weight")


class ProjectedAttention(nn.MultiheadAttention):
    """Made of an ``nn.MultiheadAttention`` by :func:`split_projections`; its arguments and results.

    Attributes:
        in_proj: queries, keys and values, one below the other.
    """

    in_proj: nn.Linear
    in_proj_weight = property(lambda _: _NoFastPath())

    def forward(  # noqa: PLR0917 (nn.MultiheadAttention's own)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention``."""
        if query.is_nested:
            raise ConfigError(
                "attention with projections as layers takes no nested tensors; make the nn.TransformerEncoder with "
                "enable_nested_tensor=False, or convert it whole"
            )
        if is_causal and attn_mask is None:
            raise ConfigError("is_causal=True says that attn_mask is the causal mask; give that mask too")
        is_batched = query.ndim == 3
        q, k, v = (self._heads(x, is_batched) for x in self._projections(query, key, value))  # [B, heads, T, head_dim]
        plain_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if plain_causal else self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, plain_causal)
        return self._output(y, is_batched), self._shown(weights, is_batched, average=average_attn_weights)

    def _projections(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Of queries, keys and values; one product where the three are one tensor."""
        if query is key is value:
            projected: Tensor = self.in_proj(query)
            return projected.chunk(3, dim=-1)
        of_query, of_key = self.in_proj(query), self.in_proj(key)
        of_value = of_key if value is key else self.in_proj(value)
        return tuple(of.chunk(3, dim=-1)[i] for i, of in enumerate((of_query, of_key, of_value)))

    def _heads(self, x: Tensor, is_batched: bool) -> Tensor:
        """[T, B, E], or as ``batch_first`` has it, or [T, E], to [B, heads, T, head_dim]."""
        if not is_batched:
            x = x[None]
        elif not self.batch_first:
            x = x.transpose(0, 1)
        heads: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return heads

    def _output(self, y: Tensor, is_batched: bool) -> Tensor:
        y = y.transpose(1, 2).flatten(2)
        if not is_batched:
            y = y[0]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        projected: Tensor = self.out_proj(y)
        return projected

    @staticmethod
    def _shown(weights: Tensor | None, is_batched: bool, *, average: bool) -> Tensor | None:
        if weights is None:
            return None
        weights = weights.mean(dim=1) if average else weights
        return weights if is_batched else weights[0]

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Additive mask of the scores [B, heads, T, S]: attn_mask [T, S] or [B * heads, T, S], padding [B, S]."""
        found = None
        if attn_mask is not None:
            found = _added(attn_mask, q.dtype)
            if attn_mask.ndim == 3:
                found = found.unflatten(0, (q.shape[0], self.num_heads))
        if padding is not None:
            hidden = _added(padding, q.dtype).reshape(q.shape[0], 1, 1, -1)
            found = hidden if found is None else found + hidden
        return found

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """With ``nn.MultiheadAttention``'s keys, in its order."""
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        later = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
        for own, known in _KEPT_NAMES.items():
            if f"{prefix}{own}" in later:
                state[f"{prefix}{known}"] = later.pop(f"{prefix}{own}")
        state.update(later)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for own, known in _KEPT_NAMES.items():
            _rename(state_dict, f"{prefix}{known}", f"{prefix}{own}")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    if old in state:
        state[new] = state.pop(old)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add; where a bool mask is True, -inf."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def split_projections(model: nn.Module) -> Mapping[str, ProjectedAttention]:
    """Let every ``nn.MultiheadAttention`` of a model compute with layers, in place; a module stays the same object.

    Those with sizes of their own for keys or values, with ``add_bias_kv`` or ``add_zero_attn``, and subclasses stay as
    they are.

    Returns:
        The modules that were changed, by path.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 8)
        >>> before = model(x)
        >>> list(split_projections(model)), model.self_attn.in_proj
        (['self_attn'], Linear(in_features=8, out_features=24, bias=True))
        >>> torch.testing.assert_close(model(x), before)
    """
    split = {}
    for path, module in model.named_modules():
        if type(module) is nn.MultiheadAttention and is_plain(module):
            layer = nn.Linear(1, 1, bias=False, device="meta")
            layer.in_features, layer.out_features = module.embed_dim, 3 * module.embed_dim
            layer.weight, layer.bias = module.in_proj_weight, module.in_proj_bias
            layer.train(module.training)
            module.in_proj_weight = module.in_proj_bias = None  # type: ignore[assignment]
            module.in_proj = layer
            module.out_proj.__class__ = nn.Linear  # type: ignore[assignment]  # from an empty subclass
            module.__class__ = ProjectedAttention
            assert isinstance(module, ProjectedAttention)
            split[path] = module
    return split


def is_plain(module: nn.MultiheadAttention) -> bool:
    """Return whether :func:`split_projections` can change a module.

    Example:
        >>> is_plain(nn.MultiheadAttention(8, 2)), is_plain(nn.MultiheadAttention(8, 2, kdim=4))
        (True, False)
    """
    same = module._qkv_same_embed_dim and module.bias_k is None and module.bias_v is None  # noqa: SLF001
    return (
        same and not module.add_zero_attn and type(module.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
    )


def join_projections(modules: Mapping[str, ProjectedAttention]) -> None:
    """Undo :func:`split_projections` where both layers are plain linear ones."""
    for module in modules.values():
        if type(module) is not ProjectedAttention or {type(module.in_proj), type(module.out_proj)} != {nn.Linear}:
            continue
        layer = module.in_proj
        del module.in_proj
        module.in_proj_weight, module.in_proj_bias = layer.weight, layer.bias
        module.out_proj.__class__ = nn.modules.linear.NonDynamicallyQuantizableLinear
        module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
