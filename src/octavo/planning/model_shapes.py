"""Shapes of transformer models: every linear layer's weight, and the parameters they hold.

A :class:`ModelShape` has what a cost model needs of a configuration: dense decoders, mixtures of experts, latent
attention (DeepSeek), hybrids with Mamba-2 layers, and encoders (ViT, DiT). :meth:`ModelShape.linears` lists its matrix
products; everything else (GEMM time, casts, memory) is computed from that list.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from octavo.errors import ConfigError

__all__ = ["MOST", "Linear", "ModelShape", "Part", "Split"]

MOST = 1 << 24  # of any number of a shape
MOST_LAYERS = 10_000


class Part(StrEnum):
    """Part of the model that a linear layer belongs to."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    MAMBA = "mamba"
    HEAD = "head"


class Split(StrEnum):
    """Dimension of the weight that tensor parallelism divides."""

    COLUMN = "column"  # N: the output's features
    ROW = "row"  # K: the input's features
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Linear layers of one shape.

    Attributes:
        name: of the layer in a block.
        n: output features.
        k: input features.
        count: layers of the model that have it.
        part: see :class:`Part`.
        split: see :class:`Split`.
        groups: experts, each with a weight of its own; 1 for other layers.
        copies: rows of the input a token makes, summed over its experts.
    """

    name: str
    n: int
    k: int
    count: int
    part: Part
    split: Split = Split.COLUMN
    groups: int = 1
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Elements of the weights, of all layers and experts."""
        return self.n * self.k * self.count * self.groups

    @property
    def multiplied(self) -> int:
        """Elements of the weights that one token is multiplied with."""
        return self.n * self.k * self.count * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a transformer; 0 where the model does not have the part.

    Attributes:
        name: canonical name, such as ``llama-3-70b``.
        layers: blocks.
        hidden: width of the residual stream.
        heads: query heads.
        vocab: tokens (classes of an encoder).
        kv_heads: key and value heads; 0 for ``heads``.
        head_dim: of queries and keys; 0 for ``hidden / heads``.
        ffn: width of a dense MLP.
        gated: whether the MLP has a gate (SwiGLU), and so three weights.
        causal: whether a position sees only those before it.
        tied: whether the head shares the embedding's weight.
        window: positions that attention sees at most, in ``window_layers`` layers; None for all.
        experts: routed experts of a layer; ``top_k`` of them compute each token.
        expert_ffn: width of one; ``shared_ffn``: of the expert that computes every token.
        expert_hidden: width of an expert's input where it is not ``hidden`` (latent experts).
        dense_layers: layers of a mixture that have a dense MLP.
        query_rank: width of latent queries; ``kv_rank``: of latent keys and values; ``rope_dim``, ``value_dim``: their
            head dimensions; ``output_rank``: of a grouped output projection.
        attention_layers: layers with attention; None for all. Likewise ``mlp_layers``.
        mamba_layers: layers with a Mamba-2 mixer, of ``mamba_width``, ``mamba_state`` and ``mamba_groups``.
        mtp_layers: further blocks that predict later tokens while training.
        streams: residual streams that blocks mix (hyper-connections).
        guessed: whether only its size is known, and proportions are the usual ones.
        source: of the numbers.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    gated: bool = True
    causal: bool = True
    tied: bool = False
    window: int = 0
    window_layers: int | None = None
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    expert_hidden: int = 0
    dense_layers: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    output_rank: int = 0
    attention_layers: int | None = None
    mlp_layers: int | None = None
    mamba_layers: int = 0
    mamba_width: int = 0
    mamba_state: int = 0
    mamba_groups: int = 1
    mtp_layers: int = 0
    streams: int = 1
    guessed: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for name, most in (("layers", MOST_LAYERS), ("hidden", MOST), ("heads", MOST), ("vocab", MOST)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"a model's {name} must be 1 to {most:,}, not {str(getattr(self, name))[:20]}")
        if self.query_dim < 1:
            raise ConfigError(f"model {self.name!r} has {self.heads} heads, more than its width of {self.hidden}")
        if self.experts and not (self.top_k and self.expert_ffn):
            raise ConfigError(f"model {self.name!r} has {self.experts} experts, but no top_k or no expert_ffn")

    @property
    def guess(self) -> str:
        """Kind of model that its shape was guessed as, "dense" or "mixture"; "" if it is known."""
        return "" if not self.guessed else "mixture" if self.experts else "dense"

    @property
    def query_dim(self) -> int:
        """Dimension of a head's query and key."""
        return self.head_dim or self.hidden // self.heads

    @property
    def value_head_dim(self) -> int:
        """Dimension of a head's value."""
        return self.value_dim or self.query_dim

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def attention_count(self) -> int:
        """Layers with attention, those that predict later tokens included."""
        return (self.layers if self.attention_layers is None else self.attention_layers) + self.mtp_layers

    @property
    def mlp_count(self) -> int:
        """Layers with an MLP or experts, those that predict later tokens included."""
        return (self.layers if self.mlp_layers is None else self.mlp_layers) + self.mtp_layers

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.mlp_count - self.dense_layers if self.experts else 0

    @property
    def windowed_layers(self) -> int:
        """Layers whose attention sees a window."""
        layers = self.attention_count if self.window_layers is None else self.window_layers
        return layers if self.window else 0

    @property
    def is_latent_mixture(self) -> bool:
        """Whether it is a mixture with latent attention, whose keys tensor parallelism cannot divide among ranks."""
        return bool(self.kv_rank and self.experts)

    @property
    def kv_width(self) -> int:
        """Elements of the KV cache a token and a layer."""
        if self.kv_rank:
            return self.kv_rank + self.rope_dim
        return 2 * self.key_heads * self.query_dim

    @property
    def state_bytes(self) -> float:
        """Bytes of the states that Mamba-2 mixers and linear attention keep of a request, of any length.

        A channel has ``mamba_state`` numbers in FP32, and three earlier positions of a convolution of width 4, in BF16,
        over the channels and the groups' two inputs.

        Example:
            >>> from octavo.planning import find_model
            >>> find_model("llama-3-8b").state_bytes, find_model("nemotron-h-8b").state_bytes
            (0.0, 102137856.0)
        """
        convolved = self.mamba_width + 2 * self.mamba_groups * self.mamba_state
        return self.mamba_layers * (4.0 * self.mamba_width * self.mamba_state + 3 * 2.0 * convolved)

    def linears(self) -> tuple[Linear, ...]:
        """Every matrix product with a weight."""
        return _linears(self)

    def list_linears(self) -> tuple[Linear, ...]:
        """Every matrix product with a weight, listed anew; :meth:`linears` keeps the list."""
        head = Linear(name="head", n=self.vocab, k=self.hidden, count=1 + self.mtp_layers, part=Part.HEAD)
        return (*self._attention(), *self._mamba(), *self._mlps(), head)

    def _attention(self) -> tuple[Linear, ...]:
        count, hidden = self.attention_count, self.hidden
        queries, values = self.heads * self.query_dim, self.heads * self.value_head_dim

        def linear(name: str, n: int, k: int, split: Split = Split.COLUMN) -> Linear:
            return Linear(name=name, n=n, k=k, count=count, part=Part.ATTENTION, split=split)

        if not count:
            return ()
        if self.output_rank:  # DeepSeek-V4: latent queries, one key that is the value, a grouped low-rank output
            return (
                linear("q_a", self.query_rank + self.query_dim, hidden, Split.NONE),
                linear("q_b", queries, self.query_rank),
                linear("o_a", self.output_rank, queries // 8),
                linear("o_b", hidden, self.output_rank, Split.ROW),
            )
        output = linear("out", hidden, values, Split.ROW)
        if self.kv_rank:
            nope = self.query_dim - self.rope_dim
            down = linear("qkv_a", self.query_rank + self.kv_rank + self.rope_dim, hidden, Split.NONE)
            up = linear("kv_b", self.heads * (nope + self.value_head_dim), self.kv_rank)
            return (down, linear("q_b", queries, self.query_rank or hidden), up, output)
        return (linear("qkv", queries + 2 * self.key_heads * self.query_dim, hidden), output)

    def _mamba(self) -> tuple[Linear, ...]:
        if not self.mamba_layers:
            return ()
        count, width = self.mamba_layers, self.mamba_width
        inner = 2 * width + 2 * self.mamba_groups * self.mamba_state
        return (
            Linear(name="mamba_in", n=inner, k=self.hidden, count=count, part=Part.MAMBA),
            Linear(name="mamba_out", n=self.hidden, k=width, count=count, part=Part.MAMBA, split=Split.ROW),
        )

    def _mlps(self) -> tuple[Linear, ...]:
        dense = self.mlp_count - self.expert_layers
        found = self._mlp("", self.ffn, dense, Part.MLP) if dense and self.ffn else ()
        if self.expert_layers:
            found += self._mlp("expert_", self.expert_ffn, self.expert_layers, Part.EXPERTS)
            if self.shared_ffn:
                found += self._mlp("shared_", self.shared_ffn, self.expert_layers, Part.MLP)
            if self.expert_hidden:
                n, count = self.expert_hidden, 2 * self.expert_layers
                found += (Linear(name="latent", n=n, k=self.hidden, count=count, part=Part.MLP, split=Split.NONE),)
        return found

    def _mlp(self, prefix: str, width: int, count: int, part: Part) -> tuple[Linear, ...]:
        is_routed = part == Part.EXPERTS
        groups, copies = (self.experts, self.top_k) if is_routed else (1, 1)
        hidden = self.expert_hidden if is_routed and self.expert_hidden else self.hidden
        up = Linear(
            name=f"{prefix}up",
            n=width * (2 if self.gated else 1),
            k=hidden,
            count=count,
            part=part,
            groups=groups,
            copies=copies,
        )
        return (up, replace(up, name=f"{prefix}down", n=hidden, k=width, split=Split.ROW))

    @property
    def parameters(self) -> int:
        """Weights of all linear layers and embeddings; norms and biases are left out."""
        linears = self.linears()
        weights = sum(linear.parameters for linear in linears if linear.part != Part.HEAD)
        routers = self.expert_layers * self.experts * self.hidden
        return weights + routers + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with, the head's included."""
        return sum(linear.multiplied for linear in self.linears())

    def attention_flops(self, seq: int) -> float:
        """FLOPs of attention's two products of one token's forward pass, averaged over a sequence of ``seq``."""
        whole = seq / 2 if self.causal else seq
        windows = self.windowed_layers
        seen = (self.attention_count - windows) * whole + windows * min(whole, self.window)
        flops = 2.0 * self.heads * (self.query_dim + self.value_head_dim) * seen
        scan = 2.0 * self.mamba_width * (128 / 2 + 3 * self.mamba_state) * self.mamba_layers  # chunks of 128 positions
        return flops + scan

    def training_flops(self, seq: int) -> float:
        """FLOPs of one token's forward and backward pass, recomputation not counted."""
        return 6.0 * self.active_parameters + 3.0 * self.attention_flops(seq)

    def cut(self, layers: int) -> "ModelShape":
        """This model with fewer layers; the dense layers of a mixture stay, as far as there is room."""
        dense = min(self.dense_layers, layers)
        windows = None if self.window_layers is None else round(self.window_layers * layers / self.layers)
        cut = replace(self, name=f"{self.name}, {layers} layers", layers=layers, dense_layers=dense, mtp_layers=0)
        return replace(cut, window_layers=windows)


@lru_cache(maxsize=256)
def _linears(shape: ModelShape) -> tuple[Linear, ...]:
    """A search for layouts asks for them thousands of times."""
    return shape.list_linears()
