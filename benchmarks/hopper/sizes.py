"""Shapes of the measurements, and the tiny shapes of a rehearsal."""

from dataclasses import dataclass

__all__ = ["HOPPER", "REHEARSAL", "ExpertCase", "LayerSize", "LinearCase", "ModelSize", "Sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCase:
    """A linear layer, [M, K] times [N, K] transposed, forward and backward.

    Attributes:
        m, k, n: its shape.
        published: torchao's rowwise speed against BF16 there, or None.
        bar: required speed over BF16, or None.
        blockwise_bar: the same of the blockwise recipe.
        compiled: whether it is compiled too.
    """

    m: int
    k: int
    n: int
    published: float | None = None
    bar: float | None = None
    blockwise_bar: float | None = None
    compiled: bool = False

    @property
    def name(self) -> str:
        """M×K×N, or the side's cube."""
        return f"{self.m}³" if self.m == self.k == self.n else f"{self.m}×{self.k}×{self.n}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCase:
    """Experts with as many tokens each, [tokens, K] times [N, K] transposed.

    Attributes:
        experts, tokens, k, n: their shape.
        bar: required speed of one launch over a launch an expert.
    """

    experts: int
    tokens: int
    k: int
    n: int
    bar: float

    @property
    def name(self) -> str:
        """Number of experts, tokens and the weight's shape."""
        return f"{self.experts} experts of {self.k}×{self.n}, {self.tokens:,} tokens each"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """A transformer layer and its batch."""

    batch: int
    length: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A decoder and its training batch."""

    vocabulary: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    batch: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that depends on how long a measurement may take.

    Attributes:
        copy: elements (bfloat16) of the copy that measures the memory's bandwidth.
        ceiling: side of the square GEMM that measures the tensor cores' throughput.
        cast: shape of the input of casts.
        gemms: M, K, N of the products.
        linears: the linear layers.
        experts: the experts.
        layer: the transformer layer.
        model: the decoder.
        chain_side: rows and columns of the GEMMs whose results are compared bit by bit.
        chain_lengths: their K.
        rounds: of a comparison.
        aim: seconds that one variant runs in a round.
    """

    copy: int
    ceiling: int
    cast: tuple[int, int]
    gemms: tuple[tuple[int, int, int], ...]
    linears: tuple[LinearCase, ...]
    experts: tuple[ExpertCase, ...]
    layer: LayerSize
    model: ModelSize
    chain_side: int
    chain_lengths: tuple[int, ...]
    rounds: int
    aim: float


HOPPER = Sizes(
    copy=1 << 29,
    ceiling=8192,
    cast=(16384, 8192),
    gemms=(
        (1024, 1024, 1024),
        (4096, 4096, 4096),
        (8192, 4096, 4096),
        (8192, 4096, 14336),
        (8192, 14336, 4096),
        (4096, 7168, 16384),
        (8192, 8192, 8192),
        (16384, 16384, 16384),
        (128, 8192, 8192),
        (16, 8192, 8192),
    ),
    linears=(
        LinearCase(m=4096, k=4096, n=4096, published=0.84, bar=1.25, compiled=True),
        LinearCase(m=8192, k=4096, n=14336, bar=1.45, compiled=True),
        LinearCase(m=16384, k=16384, n=16384, published=1.42, bar=1.65, compiled=True),
        LinearCase(m=8192, k=4096, n=4096, published=1.00, blockwise_bar=1.40),
        LinearCase(m=8192, k=4096, n=16384, blockwise_bar=1.40),
        LinearCase(m=8192, k=16384, n=4096, blockwise_bar=1.40),
        LinearCase(m=1024, k=1024, n=1024, published=0.42),
    ),
    experts=(
        ExpertCase(experts=64, tokens=8, k=2048, n=1408, bar=2.0),
        ExpertCase(experts=64, tokens=1024, k=2048, n=1408, bar=1.0),
    ),
    layer=LayerSize(batch=4, length=2048, hidden=4096, heads=32, kv_heads=8, ffn=14336),
    model=ModelSize(
        vocabulary=32768,
        hidden=2048,
        ffn=8192,
        layers=16,
        heads=32,
        kv_heads=8,
        batch=4,
        length=2048,
    ),
    chain_side=256,
    chain_lengths=(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    rounds=15,
    aim=4e-3,
)

REHEARSAL = Sizes(
    copy=1 << 10,
    ceiling=32,
    cast=(256, 128),
    gemms=((32, 128, 48), (16, 64, 64)),
    linears=(
        LinearCase(m=32, k=32, n=32, published=0.84, bar=1.25, compiled=True),
        LinearCase(m=32, k=64, n=48, blockwise_bar=1.40),
    ),
    experts=(ExpertCase(experts=4, tokens=16, k=32, n=48, bar=2.0),),
    layer=LayerSize(batch=2, length=16, hidden=32, heads=4, kv_heads=2, ffn=64),
    model=ModelSize(
        vocabulary=64,
        hidden=32,
        ffn=64,
        layers=2,
        heads=4,
        kv_heads=2,
        batch=2,
        length=16,
    ),
    chain_side=16,
    chain_lengths=(32, 256),
    rounds=3,
    aim=0.0,
)
