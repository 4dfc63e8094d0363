"""Work that the planner predicts: a training step, its parallel layout, a service, a matrix product."""

from dataclasses import dataclass, replace
from enum import StrEnum

from octavo.errors import ConfigError
from octavo.planning.hardware import Hardware
from octavo.planning.model_shapes import ModelShape
from octavo.planning.precision import Precision

__all__ = [
    "DIVIDED_AS",
    "MOST",
    "SERVERS",
    "TRAINED_WITH",
    "Framework",
    "GemmJob",
    "GemmPass",
    "Layout",
    "Recompute",
    "ServingJob",
    "Sharding",
    "TrainingJob",
]


class Sharding(StrEnum):
    """Division of weights, gradients and optimizer states among data-parallel ranks."""

    DDP = "ddp"  # every rank has all
    ZERO1 = "zero1"  # optimizer states divided, whole gradients reduced once a step: Megatron's distributed optimizer
    ZERO2 = "zero2"  # gradients too, so reduced every micro-batch; weights gathered once a step
    FSDP = "fsdp"  # weights too, gathered for every use


class Recompute(StrEnum):
    """Activations that backward computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # norms and activation functions: everything but GEMMs and attention
    FULL = "full"  # all but each block's input


class Framework(StrEnum):
    """Program that trains or serves; each has costs of its own."""

    TITAN = "torchtitan"  # PyTorch compiled, FSDP2
    MEGATRON = "megatron"
    JAX = "jax"
    COMPOSER = "composer"  # llm-foundry, eager, FSDP1
    EAGER = "eager"  # PyTorch or transformers without compilation
    TRTLLM = "tensorrt-llm"
    VLLM = "vllm"


MOST = 10**9  # GPUs, and tokens of a sequence, a prompt or an answer
SERVERS = (Framework.VLLM, Framework.TRTLLM)

# FP8 recipes of each program's published trainings, in octavo's names; what it is predicted to do with others is a
# transfer of what other programs showed.
TRAINED_WITH: dict[Framework, tuple[str, ...]] = {
    Framework.TITAN: ("tensorwise", "rowwise", "mxfp8"),
    Framework.MEGATRON: ("tensorwise", "mxfp8", "delayed"),
    Framework.JAX: ("tensorwise", "delayed"),
    Framework.COMPOSER: ("delayed",),
    Framework.EAGER: ("mxfp8", "delayed"),
}

# How they divide states, where their pages say so; HSDP counts as FSDP.
DIVIDED_AS: dict[Framework, tuple[Sharding, ...]] = {
    Framework.TITAN: (Sharding.FSDP,),
    Framework.MEGATRON: (Sharding.ZERO1, Sharding.FSDP),
    Framework.JAX: (Sharding.FSDP,),
    Framework.COMPOSER: (Sharding.ZERO2, Sharding.FSDP),
    Framework.EAGER: (Sharding.FSDP,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel layout of a training.

    Attributes:
        gpus: all.
        tp: tensor and sequence parallel ranks.
        pp: pipeline stages; ``vp`` of them interleaved on each GPU.
        cp: context parallel ranks.
        ep: expert parallel ranks.
        etp: ranks that divide each expert.
        shard: ranks that FSDP divides weights among; the others hold replicas (HSDP). 0 for all data-parallel ranks.
        sharding: see :class:`Sharding`.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1
    shard: int = 0
    sharding: Sharding = Sharding.FSDP

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "pp", "cp", "ep", "etp", "vp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a layout's {name} must be 1 or more, not {getattr(self, name)}")
        if self.gpus % (self.tp * self.pp * self.cp):
            raise ConfigError(f"{self.gpus} GPUs are not a multiple of TP {self.tp} × PP {self.pp} × CP {self.cp}")

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def shard_ranks(self) -> int:
        """Ranks that divide optimizer states; context-parallel ranks take part."""
        return min(self.shard, self.dp * self.cp) if self.shard else self.dp * self.cp

    def __str__(self) -> str:
        names = (("TP", self.tp), ("PP", self.pp), ("VP", self.vp), ("CP", self.cp), ("EP", self.ep))
        parts = [f"{name}{value}" for name, value in names if value > 1]
        ranks = self.dp * self.cp
        replicas = ranks // self.shard_ranks
        kind = f"hsdp {replicas} × {self.shard_ranks}" if replicas > 1 else f"{self.sharding} {ranks}"
        return " ".join([*parts, kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One training step.

    Attributes:
        model: its shape.
        hardware: of each GPU.
        layout: see :class:`Layout`.
        seq: tokens of a sequence.
        global_batch: sequences a step.
        micro_batch: sequences a rank computes at once.
        precision: of the linear layers.
        recompute: None chooses the least that fits into memory.
        framework: that runs it.
        release: year and month of the framework, such as 2026.5; 0 if unknown.
        frozen: whether weights take no gradient (LoRA).
        token_drop: whether experts drop tokens, so that all shapes are known to the host.
        overlaps_tp: whether tensor-parallel communication overlaps its GEMMs (asynchronous TP).
        bf16_states: whether weights, gradients and moments are kept in BF16, without FP32 copies.
    """

    model: ModelShape
    hardware: Hardware
    layout: Layout
    seq: int
    global_batch: int
    micro_batch: int
    precision: Precision
    recompute: Recompute | None = None
    framework: Framework = Framework.TITAN
    release: float = 0.0
    frozen: bool = False
    token_drop: bool = False
    overlaps_tp: bool = False
    bf16_states: bool = False

    def __post_init__(self) -> None:
        for name in ("seq", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a training's {name} must be 1 or more, not {getattr(self, name)}")

    @property
    def micro_batches(self) -> int:
        """Micro-batches a rank computes each step."""
        return max(1, round(self.global_batch / (self.micro_batch * self.layout.dp)))

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one context-parallel rank."""
        return max(1, self.micro_batch * self.seq // self.layout.cp)

    def at(self, precision: Precision) -> "TrainingJob":
        """The same step in another precision."""
        return replace(self, precision=precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """Offline inference at the throughput that memory allows.

    Attributes:
        model: its shape.
        hardware: of each GPU.
        gpus: of one replica.
        tp: ranks that divide every layer.
        prompt: tokens of a prompt; ``answer``: of what is generated.
        precision: of weights and linear layers.
        requests: in flight at once; 0 for as many as memory holds.
        framework: that serves.
        divides_experts: whether ranks hold different experts and attend to different requests (DEP).
        release: year and month of the framework; 0 if unknown.
        replicas: that serve side by side.
    """

    model: ModelShape
    hardware: Hardware
    gpus: int
    tp: int
    prompt: int
    answer: int
    precision: Precision
    requests: int = 0
    framework: Framework = Framework.VLLM
    divides_experts: bool = False
    release: float = 0.0
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.model.attention_count <= self.model.mtp_layers and not self.model.state_bytes:
            raise ConfigError(
                f"{self.model.name} has neither attention nor a mixer with states; plan inference of a model that "
                "generates tokens"
            )


class GemmPass(StrEnum):
    """GEMMs of a linear layer that a measurement covers."""

    FORWARD = "forward"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"
    BACKWARD = "backward"  # the two gradients
    ALL = "all"
    SUM = "sum"  # of the three, each measured with casts of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmJob:
    """Linear layers on one GPU.

    Attributes:
        shapes: (M, N, K) of each; M of one group.
        groups: of a grouped or a batched GEMM.
        passes: see :class:`GemmPass`.
        hardware: of the GPU.
        precision: of the GEMMs.
        attention: (tokens, heads, head_dim, sequence) of a whole transformer layer; None for linear layers alone.
        ranks: tensor-parallel ranks of a layer.
        weight_cached: whether the weight was quantized before.
        is_grouped: whether a grouped kernel is used, which one group may have, and a batch of equal products has not.
    """

    shapes: tuple[tuple[int, int, int], ...]
    hardware: Hardware
    precision: Precision
    groups: int = 1
    passes: GemmPass = GemmPass.ALL
    attention: tuple[int, int, int, int] | None = None
    ranks: int = 1
    weight_cached: bool = False
    is_grouped: bool = False
