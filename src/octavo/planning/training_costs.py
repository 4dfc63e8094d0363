"""Ideal seconds of a training step by kind: what the hardware's limits allow, before any efficiency.

Seconds of one micro-batch on one GPU: GEMMs by kernel, attention, memory traffic of everything elementwise, casts, and
communication inside the model. Seconds of the whole step: gathers and reductions of weights and gradients, and the
optimizer. :mod:`octavo.planning.constants` turns them into time.
"""

import math

from octavo.numerics import PerTensor
from octavo.planning.gemm_costs import Parts, add_gemm
from octavo.planning.jobs import Layout, Recompute, Sharding, TrainingJob
from octavo.planning.model_shapes import Linear, Part, Split
from octavo.planning.precision import BF16, bytes_cast, cast_kernels, linear_precision
from octavo.planning.training_memory import recomputed_share

__all__ = ["job_marks", "linear_parts", "training_parts"]

MOST_DOMAINS = 4  # that one row is routed to, DeepSeek-V3, arXiv 2412.19437, section 2.1.2
LAUNCHES_OF_A_BLOCK = 40.0  # kernels of a block's forward and backward pass besides GEMMs and casts


def training_parts(job: TrainingJob) -> Parts:
    """Return the ideal seconds of a step by kind, and the counts that its schedule needs.

    Besides seconds: ``launches`` and ``expert_launches`` (kernels of a micro-batch), ``micro_batches``, ``bubble``
    (idle share of the pipeline) and ``scale`` (doublings of 8 GPUs).
    """
    policy, again = recomputed_share(job)
    parts: Parts = Parts(float)
    for linear in job.model.linears():
        for name, value in linear_parts(job, linear, again=again).items():
            parts[name] += value
    _add_blocks(parts, job, again + (0.15 if policy == Recompute.SELECTIVE else 0.0))
    _add_communication(parts, job, again)
    _add_step(parts, job)
    parts |= job_marks(job)
    parts["micro_batches"] = job.micro_batches
    parts["bubble"] = (job.layout.pp - 1) / (job.micro_batches * job.layout.vp)
    parts["scale"] = max(0.0, math.log2(job.layout.gpus / 8))
    return parts


def job_marks(job: TrainingJob) -> Parts:
    """Return what a job is marked with: the factors of its program, kernels and release that hold for all parts."""
    marks: Parts = Parts(float)
    for mark in ("framework", "attention", "host"):
        marks[f"{mark}_{job.framework}"] = 1.0
    marks[f"attention_{job.hardware.generation}"] = 1.0
    marks[f"framework_{job.framework}_{job.hardware.generation}"] = 1.0
    if job.model.experts:
        marks[f"framework_{job.framework}_experts"] = 1.0
    marks["years"] = job.release - 2025 if job.release else 0.0
    if job.model.experts and job.release >= 2026.4 and job.hardware.generation == "blackwell":
        marks["framework_fused_experts"] = 1.0  # NeMo 26.06 fused the casts and products of experts
    return marks


def linear_parts(job: TrainingJob, linear: Linear, *, again: float = 0.0) -> Parts:
    """Return the ideal seconds of one kind of linear layer in a micro-batch: GEMMs, casts and launches.

    ``again`` is the share of blocks whose forward pass is computed twice.
    """
    parts: Parts = Parts(float)
    layout, precision = job.layout, linear_precision(job.precision, linear)
    is_routed = linear.part == Part.EXPERTS
    ranks = layout.etp if is_routed else layout.tp
    groups = max(1, linear.groups // layout.ep) if is_routed else 1
    n, k = _local(linear, ranks)
    copies = job.tokens * linear.copies * (layout.etp / layout.tp if is_routed else 1.0)
    m = max(1, round(copies / groups))
    times = linear.count / layout.pp
    forwards = 1.0 + (again if linear.part != Part.HEAD else 0.0)
    add_gemm(parts, (m, n, k), precision, job.hardware, groups=groups, times=times * forwards)
    add_gemm(parts, (m, k, n), precision, job.hardware, groups=groups, times=times)
    if not job.frozen:
        last = BF16 if precision.hp_grad_weight else precision
        add_gemm(parts, (n, k, m), last, job.hardware, groups=groups, times=times)
    if precision.is_bf16:
        return parts
    moved = bytes_cast(precision)
    keeps = not (layout.sharding == Sharding.FSDP and layout.shard_ranks > 1)  # a gathered weight is cast every time
    weight = moved.weight / (job.micro_batches if keeps else 1.0)
    bytes_moved = groups * (m * (k * moved.input * forwards + n * moved.grad_output) + n * k * weight)
    parts["cast"] += times * bytes_moved / (job.hardware.bandwidth * 1e9)
    kernels = times * (2.0 + forwards) * cast_kernels(precision)
    parts["cast_gaps"] += kernels
    count = kernels * (groups if is_routed else 1)
    parts["expert_launches" if is_routed else "launches"] += count
    return parts


def _local(linear: Linear, ranks: int) -> tuple[int, int]:
    """N and K of one tensor-parallel rank's weight."""
    n = linear.n // ranks if linear.split == Split.COLUMN else linear.n
    k = linear.k // ranks if linear.split == Split.ROW else linear.k
    return max(1, n), max(1, k)


def _add_blocks(parts: Parts, job: TrainingJob, again: float) -> None:
    """Attention, and everything elementwise."""
    model, layout, tokens = job.model, job.layout, job.tokens
    share = 1.0 / (layout.tp * layout.pp)
    parts["attention"] += (3.5 + again) * model.attention_flops(job.seq) * tokens * share / job.hardware.peak(16)
    norms = model.attention_count + model.mlp_count + model.mamba_layers
    stream = norms * model.hidden * model.streams * 2.0 * 5  # bytes of a norm and a residual addition
    wide = sum(
        linear.count * linear.copies * 2.0 * (1.5 * linear.n if linear.name.endswith("up") else linear.n)
        for linear in model.linears()
        if linear.part != Part.HEAD
    )
    routed = model.expert_layers * model.top_k * (model.expert_hidden or model.hidden) * 2.0 * 4
    scan = model.mamba_layers * model.mamba_width * 2.0 * 16
    moved = (3.0 + again) * (stream + wide + routed + scan) + 18.0 * model.vocab * (1 + model.mtp_layers)
    parts["memory"] += moved * tokens * share / (job.hardware.bandwidth * 1e9)
    blocks = (norms / 2) / layout.pp
    parts["launches"] += blocks * LAUNCHES_OF_A_BLOCK * (1 + again / 3)
    if model.experts and not job.token_drop:
        parts["expert_launches"] += model.expert_layers / layout.pp * (30 + 2.0 * model.experts / layout.ep)


def _add_communication(parts: Parts, job: TrainingJob, again: float) -> None:
    """Collectives inside the model, seconds of a micro-batch."""
    model, layout, hardware = job.model, job.layout, job.hardware
    stream = job.tokens * model.hidden * 2.0
    blocks = (model.attention_count + model.mlp_count + model.mamba_layers) / layout.pp
    passes = 4.0 + again  # a gather and a scatter forward, and again backward
    if layout.tp > 1:
        sent = passes * stream * (layout.tp - 1) / layout.tp * blocks
        parts["collectives"] += passes * blocks
        parts["tp_overlapped" if job.overlaps_tp else "tp"] += sent / hardware.rate(layout.tp)
    parts["collectives"] += _amax_collectives(job)
    if layout.cp > 1:
        keys = job.tokens * model.key_heads * (model.query_dim + model.value_head_dim) * 2.0 / layout.tp
        sent = 3.0 * keys * (layout.cp - 1) * model.attention_count / layout.pp
        parts["cp"] += sent / hardware.rate(layout.tp * layout.cp)
    if model.experts and layout.ep * layout.etp > 1:
        _add_expert_exchange(parts, job, passes)
    if layout.pp > 1:
        parts["pp"] += 2.0 * layout.vp * stream / layout.tp / (hardware.network * 1e9)


def _amax_collectives(job: TrainingJob) -> float:
    """All-reduces of amaxes in a micro-batch: one a step for delayed scales and for weights that are gathered as codes.

    A scale from the whole tensor needs one more for each tensor that tensor-parallel ranks divide: the input of a
    layer divided by columns, the gradient of the output of one divided by rows.
    """
    layout, recipe = job.layout, job.precision.recipe
    spec = recipe.output.a or recipe.output.b
    if layout.gpus == 1 or spec is None or not isinstance(spec.granularity, PerTensor):
        return 0.0
    once = 1.0 / job.micro_batches
    if recipe.is_delayed:
        return once
    divided = (
        0
        if layout.tp == 1
        else sum(linear.count for linear in job.model.linears() if linear.part in (Part.ATTENTION, Part.MLP))
    )
    return divided / layout.pp + (once if job.precision.gathers_codes else 0.0)


def _add_expert_exchange(parts: Parts, job: TrainingJob, passes: float) -> None:
    """Rows that travel to their experts and back.

    Between domains a row is sent once to each domain that has one of its experts, and spreads there over links.
    """
    model, layout, hardware = job.model, job.layout, job.hardware
    row = (model.expert_hidden or model.hidden) * 2.0 * job.tokens / layout.tp
    domains = max(1.0, layout.ep * layout.etp / hardware.domain)
    outside = min(model.top_k, domains, MOST_DOMAINS) * (domains - 1) / domains
    inside = min(model.top_k, layout.ep) * (layout.ep - 1) / layout.ep
    sent = passes * row * model.expert_layers / layout.pp
    parts["collectives"] += passes * model.expert_layers / layout.pp * (2 if layout.etp > 1 else 1)
    parts["ep"] += sent * inside / (hardware.link * 1e9)
    parts["ep_network"] += sent * outside / (hardware.network * 1e9)
    parts["etp"] += sent * model.top_k * (layout.etp - 1) / (hardware.link * 1e9)


def _data_rate(job: TrainingJob, ranks: int) -> float:
    """Bytes a second at which every rank of a data-parallel group receives the whole of a sharded tensor."""
    layout, hardware = job.layout, job.hardware
    inner = layout.tp * layout.pp if layout.tp * layout.pp <= hardware.domain else layout.tp
    neighbours = max(1, hardware.domain // max(1, inner))
    if ranks <= neighbours:
        return hardware.link * 1e9
    return min(hardware.link, neighbours * hardware.network) * 1e9


def _sizes(job: TrainingJob) -> tuple[float, float]:
    """Parameters of a rank that data-parallel ranks exchange: dense ones and experts."""
    layout, model = job.layout, job.model
    experts = sum(linear.parameters for linear in model.linears() if linear.part == Part.EXPERTS)
    return (model.parameters - experts) / (layout.tp * layout.pp), experts / (layout.ep * layout.etp * layout.pp)


def _exchanges(layout: Layout, dense: float, experts: float) -> list[tuple[float, int]]:
    """Parameters and ranks of each group that exchanges them."""
    ranks = layout.shard_ranks
    of_experts = max(1, ranks * layout.tp // (layout.ep * layout.etp))
    return [(dense, ranks), (experts, of_experts)]


def _add_step(parts: Parts, job: TrainingJob) -> None:
    """Weights, gradients and the optimizer, seconds of a step."""
    layout, precision = job.layout, job.precision
    dense, experts = _sizes(job)
    trained = 0.0 if job.frozen else 1.0
    for parameters, ranks in _exchanges(layout, dense, experts):
        share = (ranks - 1) / ranks
        if not share or not parameters:
            continue
        weight_bytes = 1.0 if precision.gathers_codes and not precision.is_bf16 else 2.0
        rate = _data_rate(job, ranks)
        if layout.sharding == Sharding.FSDP:
            uses = job.micro_batches * (2 * weight_bytes + 4.0 * trained)
            parts["fsdp"] += uses * parameters * share / rate
        elif layout.sharding == Sharding.ZERO2:  # gathered once a step, while the first forward pass computes
            parts["fsdp"] += (weight_bytes + 4.0 * trained * job.micro_batches) * parameters * share / rate
        else:
            parts["dp"] += (weight_bytes + 2.0) * trained * parameters * share / rate
    owned = sum(parameters / ranks for parameters, ranks in _exchanges(layout, dense, experts))
    replicas = layout.dp * layout.cp // layout.shard_ranks
    if replicas > 1:
        parts["dp"] += 8.0 * trained * owned / (job.hardware.network * 1e9)
    owned = dense + experts if layout.sharding == Sharding.DDP else owned
    parts["optimizer"] += 32.0 * trained * owned / (job.hardware.bandwidth * 1e9)
