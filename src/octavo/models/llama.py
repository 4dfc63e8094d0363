"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU or a mixture of such experts.

The module tree and the parameter names are those of Hugging Face's ``LlamaForCausalLM``, and rotary positions rotate
the same pairs of elements (first half with second half of a head), so a state_dict of this model loads there
unchanged and gives the same logits.

| tensor               | shape            | note                                             |
|----------------------|------------------|--------------------------------------------------|
| tokens               | [B, T] int64     |                                                  |
| hidden               | [B, T, H]        | the residual stream; stays FP32 under autocast   |
| queries              | [B, T, heads, D] | D = hidden_size / num_heads, if not given        |
| keys, values         | [B, T, kv, D]    | one key head serves num_heads / kv query heads   |
| logits               | [B, T, V]        |                                                  |

The seven linears of a layer are ``nn.Linear``, which ``octavo.convert`` replaces. Llama's have no bias. Qwen2 is the
same model with biases of queries, keys and values (arXiv 2407.10671, section 2.2). Mixtral, Qwen2-MoE, Qwen3-MoE and
OLMoE have experts in place of the MLP, the latter two norms of queries and keys; octavo serves them and does not train
them by this class. There is no dropout and no padding mask; a training batch is always full.

One forward serves training, generation and export. Without a cache, attention is causal over the T tokens. With a
:class:`DecoderCache`, the tokens follow the cached positions, and the cache implements attention.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octavo.errors import ConfigError
from octavo.memory import check_fits
from octavo.nn import RMSNorm, RotaryScaling, rotary_table, rotate
from octavo.nn.attention import attend
from octavo.nn.smooth_input import smooth_linear

__all__ = ["LARGEST", "QK_NORMS", "DecoderCache", "Llama", "LlamaConfig", "causal_attention", "mlps_of", "skip_init"]

INIT_STD = 0.02
LARGEST = {
    "num_layers": 10_000,
    "vocab_size": 1 << 24,
    "max_positions": 1 << 24,
    "num_experts": 10_000,
}  # creating modules takes time as well as memory
QK_NORMS = ("head", "row")  # RMSNorm of each head, as in Qwen3, or of all heads of a token together, as in OLMoE
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values [B, T, heads, D] → [B, T, heads, D]


class DecoderCache(Protocol):
    """Keys and values of all layers, as :class:`Llama` reads and extends them."""

    @property
    def length(self) -> int:
        """Number of cached positions, before the current tokens."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from T positions to themselves and to all earlier ones.

        Args:
            layer: index of the decoder layer.
            queries: [B, T, heads, D], with rotary positions applied.
            keys: [B, T, kv, D], with rotary positions applied.
            values: [B, T, kv, D].

        Returns:
            [B, T, heads, D].
        """


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of every position to itself and all earlier ones, without a cache."""
    return attend(queries, keys, values, causal=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a decoder.

    Attributes:
        vocab_size: number of token ids, V.
        hidden_size: width of the residual stream, H.
        intermediate_size: width inside the SwiGLU block, or inside each expert's.
        dense_size: width inside the one MLP of ``dense_layers``; only with those.
        shared_size: width inside the expert that every token goes to, by a share of its own; None has none.
        num_layers: number of decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        max_positions: longest sequence the position table covers.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: of the rotary wavelengths, as in Llama 3.1; None has none.
        rms_norm_eps: added to the mean square before the root.
        tie_embeddings: whether the head shares the embedding's weight.
        qkv_bias: whether the projections of queries, keys and values have biases, as in Qwen2.
        out_bias: whether the output projection has a bias; Llama's "attention_bias" sets this and ``qkv_bias``.
        mlp_bias: whether the three linears of the MLP have biases.
        head_size: width of one head; None is hidden_size / num_heads. It must be even.
        qk_norm: one of ``QK_NORMS``: norms of queries and keys before they are rotated; None has none.
        num_experts: experts of each layer; None has one MLP.
        experts_per_token: experts that each token goes to, those with the highest probabilities; only with num_experts.
        dense_layers: indices of the layers that have one MLP among others with experts.
        normalize_shares: whether the probabilities of a token's experts are divided by their sum.

    Raises:
        ConfigError: a size that is not an integer of at least 1 or exceeds ``LARGEST``, heads that do not divide, or
            experts_per_token without num_experts, or more than those.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_size: int | None = None
    qk_norm: str | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    normalize_shares: bool = False
    dense_layers: tuple[int, ...] = ()
    dense_size: int | None = None
    shared_size: int | None = None

    def __post_init__(self) -> None:
        _check_values(self)
        for name, most in LARGEST.items():
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"{name} must be at most {most:,}, not {getattr(self, name):,}")
        self._check_heads()
        if self.qk_norm not in (None, *QK_NORMS):
            raise ConfigError(f"qk_norm must be one of {', '.join(QK_NORMS)} or None, not {self.qk_norm!r}")
        if self.experts_per_token not in ([None] if self.num_experts is None else range(1, self.num_experts + 1)):
            raise ConfigError(
                f"experts_per_token must be from 1 to num_experts, or None if that is None; {self.experts_per_token} "
                f"does not fit {self.num_experts}"
            )
        self._check_mixture()

    def _check_mixture(self) -> None:
        if self.num_experts is None and (self.dense_layers or self.shared_size):
            raise ConfigError("dense_layers and shared_size are of a mixture; give num_experts")
        if bool(self.dense_layers) != (self.dense_size is not None):
            raise ConfigError("dense_layers and dense_size go together; give both or neither")
        if not {*self.dense_layers} <= {*range(self.num_layers)}:
            raise ConfigError(f"dense_layers must be from 0 to {self.num_layers - 1}, not {self.dense_layers}")

    def _check_heads(self) -> None:
        if self.head_size is not None and self.head_size % 2:
            raise ConfigError(f"head_size must be even, because rotary positions rotate pairs, not {self.head_size}")
        if self.head_size is None and self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"hidden_size must be a multiple of twice num_heads, because rotary positions rotate pairs of a head; "
                f"{self.hidden_size} is not a multiple of {2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads must divide num_heads; {self.num_kv_heads} does not divide {self.num_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head, D."""
        return self.head_size or self.hidden_size // self.num_heads

    def rotary_table(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, float32 [max_positions, D]."""
        return rotary_table(self.head_dim, self.max_positions, self.rope_theta, scaling=self.rope_scaling)

    def mlp_sizes(self, layer: int) -> list[int]:
        """Widths inside the MLPs of a layer: the only one, or those of each expert and of the shared one."""
        if self.num_experts is None:
            return [self.intermediate_size]
        if layer in self.dense_layers:
            assert self.dense_size is not None
            return [self.dense_size]
        return [self.intermediate_size] * self.num_experts + ([self.shared_size] if self.shared_size else [])

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a router."""
        return self.num_experts is not None and layer not in self.dense_layers

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Elements that a norm of queries and one of keys spans; 0 without norms."""
        if self.qk_norm == "row":
            return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (self.head_dim, self.head_dim) if self.qk_norm else (0, 0)

    @property
    def parameters(self) -> int:
        """Number of learned parameters.

        Example:
            >>> LlamaConfig(
            ...     vocab_size=64,
            ...     hidden_size=32,
            ...     intermediate_size=64,
            ...     num_layers=1,
            ...     num_heads=2,
            ...     num_kv_heads=1,
            ...     max_positions=16,
            ... ).parameters
            13408
        """
        H, kv, queries = self.hidden_size, self.num_kv_heads * self.head_dim, self.num_heads * self.head_dim
        biases = self.qkv_bias * (queries + 2 * kv) + self.out_bias * H
        attention = 2 * H * (queries + kv) + 2 * H + sum(self.qk_norm_sizes) + biases
        routed = 0 if self.num_experts is None else self.num_layers - len(self.dense_layers)
        experts = (self.num_experts or 0) * (self._mlp_parameters(self.intermediate_size) + H)  # with the router's row
        shared = self._mlp_parameters(self.shared_size) + H if self.shared_size else 0
        dense = self._mlp_parameters(self.dense_size or self.intermediate_size)
        mlps = routed * (experts + shared) + (self.num_layers - routed) * dense
        return self.num_layers * attention + mlps + H + self.vocab_size * H * (1 if self.tie_embeddings else 2)

    def _mlp_parameters(self, size: int) -> int:
        return 3 * self.hidden_size * size + self.mlp_bias * (2 * size + self.hidden_size)

    @property
    def described(self) -> str:
        """Sizes as text for messages."""
        return f"hidden_size {self.hidden_size:,}, {self.num_layers:,} layers and {self.vocab_size:,} tokens"


def _check_values(config: LlamaConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if field.type == int | None and value is None:
            continue
        if field.type in (int, int | None) and not (is_number and isinstance(value, int) and value >= 1):
            raise ConfigError(f"{field.name} must be a whole number of at least 1, not {value!r}")
        if field.type is float and not (is_number and 0 < value < math.inf):
            raise ConfigError(f"{field.name} must be a positive number, not {value!r}")
        if field.type is bool and not isinstance(value, bool):
            raise ConfigError(f"{field.name} must be true or false, not {value!r}")


class SelfAttention(nn.Module):
    """Causal self-attention with rotary positions and grouped key-value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=config.out_bias)
        self.q_norm, self.k_norm = (
            RMSNorm(size, eps=config.rms_norm_eps) if size else None for size in config.qk_norm_sizes
        )

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention = causal_attention) -> Tensor:
        """Attend from every position to itself and all earlier ones; ``cos`` and ``sin`` are [T, D]."""
        heads = (-1, self.head_dim)  # -1: several ranks may share them
        values = self.v_proj(hidden).unflatten(-1, heads)
        queries = rotate(_normed(self.q_proj(hidden), self.q_norm).unflatten(-1, heads), cos, sin)
        keys = rotate(_normed(self.k_proj(hidden), self.k_norm).unflatten(-1, heads), cos, sin)
        out: Tensor = self.o_proj(attention(queries, keys, values).flatten(2))
        return out


def _normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    """Normalize each of the vectors of the norm's size that a row consists of."""
    return x if norm is None else norm(x.unflatten(-1, (-1, norm.size))).flatten(-2)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202, equation 6)."""

    is_smooth = False  # training.smooth_swiglu sets it

    def __init__(self, config: LlamaConfig, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map each position independently, [B, T, H] to [B, T, H]."""
        product = F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        out: Tensor = smooth_linear(self.down_proj, product) if self.is_smooth else self.down_proj(product)
        return out


class Router(nn.Module):
    """The experts of each token: those with the highest probabilities of a softmax over all."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        assert config.experts_per_token is not None
        self.top_k, self.normalizes = config.experts_per_token, config.normalize_shares
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Map [R, H] to each row's experts and their shares in its output, [R, top_k] each."""
        probabilities = F.linear(rows, self.weight).float().softmax(dim=-1)
        shares, experts = probabilities.topk(self.top_k, dim=-1)
        return experts, shares / shares.sum(dim=-1, keepdim=True) if self.normalizes else shares


class Experts(nn.Module):
    """Σ share · expert(x) over each token's experts (Shazeer et al., arXiv 1701.06538, equation 1), in their order.

    Then sigmoid(gate · x) · expert(x) of the expert that every token goes to, if there is one, as in Qwen2-MoE.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = nn.ModuleList(MLP(config, config.intermediate_size) for _ in range(config.num_experts or 0))
        self.shared_expert = self.shared_expert_gate = None
        if config.shared_size is not None:
            self.shared_expert = MLP(config, config.shared_size)
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map each position independently, [B, T, H] to [B, T, H]."""
        rows = hidden.flatten(0, -2)
        experts, shares = self.gate(rows)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(experts == index)
            if len(row):
                added = expert(rows[row]) * shares[row, place, None]
                out.index_add_(0, row, added.to(out.dtype))
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out += self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)
        return out.view_as(hidden)


class DecoderLayer(nn.Module):
    """Attention and MLP or experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, index: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Experts(config) if config.has_experts(index) else MLP(config, *config.mlp_sizes(index))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention = causal_attention) -> Tensor:
        """Add the outputs of attention and MLP to ``hidden``."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, attention)
        added: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


def mlps_of(layer: DecoderLayer) -> list[MLP]:
    """The experts of a layer, the one that every token goes to last; or its one MLP."""
    if not isinstance(layer.mlp, Experts):
        return [layer.mlp]
    experts: Any = layer.mlp.experts
    return [*experts, *([] if layer.mlp.shared_expert is None else [layer.mlp.shared_expert])]


class Decoder(nn.Module):
    """Embedding, layers and the last norm: everything below the head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        cos, sin = config.rotary_table()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """Tokens [B, T] to the normalised residual stream [B, T, H]."""
        hidden = self.embed_tokens(tokens)
        for stream in self.streams(hidden, cache=cache, length=tokens.shape[1]):
            hidden = stream
        normed: Tensor = self.norm(hidden)
        return normed

    def streams(
        self, hidden: Tensor, *, first: int = 0, cache: DecoderCache | None = None, length: int | None = None
    ) -> Iterator[Tensor]:
        """Yield the residual stream [B, T, H] after each layer from ``first`` on, starting with ``hidden``.

        ``length`` is T where ``hidden`` has this rank's part of the positions.
        """
        cos, sin = self._angles(hidden.shape[1] if length is None else length, cache)
        for index, layer in enumerate(self.layers[first:], first):
            attention = causal_attention if cache is None else partial(cache.attend, index)
            hidden = layer(hidden, cos, sin, attention)
            yield hidden

    def _angles(self, length: int, cache: DecoderCache | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the current positions, [T, D]."""
        if cache is None:
            return self.cos[:length], self.sin[:length]
        # index_select, because torch.export cannot infer the length of a slice with a dynamic start.
        positions = torch.arange(length, device=self.cos.device) + cache.length
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


class Llama(nn.Module):
    """A decoder with a language-model head.

    Args:
        config: shape of the model.
        seed: seed of the initial weights, which do not depend on torch's global generator.

    Raises:
        ConfigError: the parameters do not fit in memory.

    Example:
        >>> config = LlamaConfig(
        ...     vocab_size=64,
        ...     hidden_size=32,
        ...     intermediate_size=64,
        ...     num_layers=1,
        ...     num_heads=2,
        ...     num_kv_heads=1,
        ...     max_positions=16,
        ... )
        >>> Llama(config, seed=0)(torch.zeros(2, 16, dtype=torch.long)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(self, config: LlamaConfig, *, seed: int = 0) -> None:
        super().__init__()
        _check_fits(config)
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._initialise(seed)

    def forward(self, tokens: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """Tokens [B, T] to logits [B, T, V].

        Args:
            tokens: int64 [B, T]; with a cache, the tokens after its positions.
            cache: keys and values of earlier positions; those of ``tokens`` are appended.

        Raises:
            ConfigError: T plus the cache's positions exceeds ``config.max_positions``.
        """
        length = tokens.shape[1] + (0 if cache is None else cache.length)
        if length > self.config.max_positions:
            raise ConfigError(
                f"this model reads at most {self.config.max_positions} tokens at once, not {length}; "
                "shorten the sequence or build the model with more max_positions"
            )
        logits: Tensor = self.lm_head(self.model(tokens, cache))
        return logits

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Draw weights from Normal(0, 0.02), with residual projections scaled by 1/sqrt(2 · layers); set biases to 0.

        Reference: Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.3.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, residual_std if adds_to_residual else INIT_STD, generator=generator)
            elif name.endswith(".bias"):
                parameter.zero_()


def _check_fits(config: LlamaConfig) -> None:
    """Check memory for BF16 weights: when a file's weights replace the initial ones, those are never written."""
    tables = 2 * config.max_positions * config.head_dim * torch.float32.itemsize
    needed, device = config.parameters * torch.bfloat16.itemsize + tables, torch.get_default_device()
    if device.type != "meta":
        check_fits(f"a model of {config.described}", needed, device, remedy="make it smaller")


class skip_init(TorchFunctionMode):  # noqa: N801 (a context, named as torch.no_grad)
    """Context in which new modules skip random initialization, for weights that a file replaces."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random_inits = {nn.init.normal_, nn.init.kaiming_uniform_, Tensor.normal_}
        return None if func in random_inits else func(*args, **(kwargs or {}))
