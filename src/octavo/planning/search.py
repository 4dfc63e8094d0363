"""The fastest parallel layout of a training: every sensible one is predicted.

Tensor parallelism stays inside the links' domain, pipelines divide the layers, experts divide evenly, and sequences are
divided only where one does not fit. Layouts that do not fit into memory with every block recomputed are skipped, and
pipelines whose longest stage has more than 1.1 times the mean stage's work.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.errors import ConfigError
from octavo.planning.constants import Constants, training_seconds
from octavo.planning.hardware import Hardware
from octavo.planning.jobs import Layout, Recompute, Sharding, TrainingJob
from octavo.planning.model_shapes import ModelShape, Part
from octavo.planning.precision import unsupported_reason
from octavo.planning.training_costs import training_parts
from octavo.planning.training_memory import Memory, planned_memory, recomputed_share, training_memory

__all__ = ["Candidate", "best_layout", "head_layers", "imbalance", "layouts", "longest_stage"]

MICRO_BATCHES = tuple(1 << doublings for doublings in range(9))
MOST_TOKENS = 65536  # on one GPU, of a micro-batch of several sequences; one is as long as memory holds
MOST_IMBALANCE = 1.1  # of a pipeline's stages: costs are those of the mean stage
POWERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout and what it is predicted to do.

    Attributes:
        job: the step.
        seconds: of the step by kind; ``total`` is all.
        memory: of the fullest GPU.
        recompute: policy, and the share of blocks that are computed again.
    """

    job: TrainingJob
    seconds: dict[str, float]
    memory: Memory
    recompute: tuple[Recompute, float]

    @property
    def recomputed(self) -> str:
        """Policy of recomputation in words, or the share of blocks that backward computes again as a whole."""
        policy, share = self.recompute
        if share >= 1:
            return str(Recompute.FULL)
        return f"{share:.0%} full" if share else str(policy)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens a second and a GPU."""
        return self.job.global_batch * self.job.seq / self.seconds["total"] / self.job.layout.gpus

    @property
    def mfu(self) -> float:
        """Share of the BF16 peak that the model's FLOPs are, recomputation not counted."""
        flops = self.tokens_per_s_per_gpu * self.job.model.training_flops(self.job.seq)
        return flops / self.job.hardware.peak(16)


def layouts(model: ModelShape, hardware: Hardware, gpus: int, *, seq: int) -> Iterator[Layout]:
    """Return the layouts that are worth predicting."""
    for tp in POWERS:
        if tp > min(8, hardware.domain) or model.heads % tp or gpus % tp:
            continue
        for pp in POWERS:
            if pp > 16 or gpus % (tp * pp) or (pp > 1 and model.layers < 2 * pp):
                continue
            for cp in POWERS if seq >= 16384 else (1,):
                if cp > 16 or gpus % (tp * pp * cp) or seq // cp < 4096 * (cp > 1):
                    continue
                for vp in range(1, 1 + (max(1, min(4, model.layers // (2 * pp))) if pp > 1 else 1)):
                    layout = Layout(gpus=gpus, tp=tp, pp=pp, cp=cp, vp=vp)
                    if imbalance(model, layout, seq=seq) <= MOST_IMBALANCE:
                        yield from _with_experts(model, layout, hardware.domain)


def _with_experts(model: ModelShape, layout: Layout, domain: int) -> Iterator[Layout]:
    """A layout with every division of the experts, and of weights among data-parallel ranks.

    Weights that are gathered for every use may be sharded inside a domain alone, with replicas in the others (HSDP).
    """
    kinds = (Sharding.FSDP, Sharding.ZERO2, Sharding.ZERO1) if layout.pp == 1 else (Sharding.ZERO1,)
    ranks = layout.gpus // layout.pp
    for ep in POWERS if model.experts else (1,):
        if ep > 1 and (model.experts % ep or ranks % ep):
            continue
        for kind in kinds:
            yield replace(layout, ep=ep, sharding=kind)
        near = domain // layout.tp
        if layout.pp == 1 and 1 < near < layout.dp * layout.cp and layout.dp * layout.cp % near == 0 and ep <= domain:
            yield replace(layout, ep=ep, shard=near)


def head_layers(model: ModelShape, *, seq: int) -> float:
    """FLOPs of the head, as a number of layers."""
    head = 6.0 * sum(linear.parameters for linear in model.linears() if linear.part == Part.HEAD)
    return head * model.layers / (model.training_flops(seq) - head)


def longest_stage(model: ModelShape, layout: Layout, *, seq: int) -> float:
    """Layers of a pipeline's longest stage, the head counted by its FLOPs; all of them without a pipeline.

    Each of a stage's ``vp`` parts holds the same number of whole layers, but for the last part of all, which holds
    those that are left, and the head. The number is the one that makes the longest stage shortest.
    """
    head = head_layers(model, seq=seq)
    if layout.pp == 1:
        return model.layers + head
    parts = layout.pp * layout.vp
    numbers = range(math.ceil(model.layers / parts), math.ceil(model.layers / (parts - 1)) + 1)
    last = [(layout.vp - 1) * each + max(0, model.layers - (parts - 1) * each) + head for each in numbers]
    return min(max(float(layout.vp * each), stage) for each, stage in zip(numbers, last, strict=True))


def imbalance(model: ModelShape, layout: Layout, *, seq: int) -> float:
    """Work of a pipeline's longest stage as a multiple of the mean stage's; 1 without a pipeline."""
    return longest_stage(model, layout, seq=seq) * layout.pp / (model.layers + head_layers(model, seq=seq))


def best_layout(job: TrainingJob, constants: Constants, candidates: list[Layout] | None = None) -> list[Candidate]:
    """Return the candidates that fit, the fastest first.

    Args:
        job: model, hardware, batch and precision; its layout gives the number of GPUs.
        constants: of the fit.
        candidates: layouts to try; None for all sensible ones.

    Raises:
        ConfigError: nothing fits, or the accelerator cannot run the precision.
    """
    reason = unsupported_reason(job.precision, job.hardware)
    if reason is not None:
        raise ConfigError(reason)
    gpus = job.layout.gpus
    tried = list(layouts(job.model, job.hardware, gpus, seq=job.seq)) if candidates is None else candidates
    found = [candidate for layout in tried for candidate in _batches(job, layout, constants)]
    if not found:
        raise ConfigError(_no_layout(job, tried))
    return sorted(found, key=lambda candidate: candidate.seconds["total"])


def _no_layout(job: TrainingJob, tried: list[Layout]) -> str:
    """Why no layout is possible: the batch does not divide among ranks whose memory would do, or memory does not."""
    gpus, batch = job.layout.gpus, job.global_batch
    ranks = {layout.dp for layout in tried if batch % layout.dp and _fits(replace(job, layout=layout))}
    if not ranks:
        return (
            f"{job.model.name} does not fit into {gpus} × {job.hardware.memory:g} GB in any layout; use more GPUs, "
            "larger ones, or a shorter sequence"
        )
    near = sorted(
        {max(1, batch // rank + more) * rank for rank in ranks for more in (0, 1)}, key=lambda n: abs(n - batch)
    )
    numbers = " or ".join(f"{number:,}" for number in sorted(near[:2]))
    return f"a batch of {batch:,} sequences does not divide among {gpus:,} GPUs in any layout that fits; use {numbers}"


def _fits(job: TrainingJob) -> bool:
    """Whether a step fits into memory, with every block recomputed if nothing else is asked for."""
    return training_memory(job, job.recompute or Recompute.FULL).total <= 0.95 * job.hardware.memory * 1e9


def _batches(job: TrainingJob, layout: Layout, constants: Constants) -> Iterator[Candidate]:
    """Predictions of a layout with micro-batches that divide the batch and fit."""
    if job.global_batch % layout.dp:
        return
    for micro in MICRO_BATCHES:
        if (job.global_batch // layout.dp) % micro or (micro > 1 and micro * job.seq // layout.cp > MOST_TOKENS):
            return
        each = replace(job, layout=layout, micro_batch=micro)
        if layout.vp > 1 and each.micro_batches % layout.pp:
            continue  # interleaved stages pass micro-batches on in groups of pp
        if not _fits(each):
            return
        yield predicted(each, constants)


def predicted(job: TrainingJob, constants: Constants) -> Candidate:
    """Return the prediction of one layout."""
    seconds = training_seconds(training_parts(job), constants.values)
    return Candidate(
        job=job,
        seconds={name: float(value) for name, value in seconds.items()},
        memory=planned_memory(job),
        recompute=recomputed_share(job),
    )
