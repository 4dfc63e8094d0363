"""Memory of a training step on the GPU that has most of it.

Weights, gradients and moments follow the sharding; activations are counted tensor by tensor for each recomputation
policy, an FP8 GEMM keeping its input as codes. Compiled frameworks fuse norms and activation functions and keep less.
"""

from dataclasses import dataclass, replace

from octavo.planning.jobs import Framework, Recompute, Sharding, TrainingJob
from octavo.planning.model_shapes import Part
from octavo.planning.precision import Kernel

__all__ = ["Memory", "planned_memory", "recomputed_share", "training_memory"]

# Bytes of the CUDA context, communication buffers and fragments: what COAT's table leaves unexplained. The planner's
# memory is judged on that same table, so the judgement is in-sample.
RESERVED = 2.2e9
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak of a step, in bytes of one GPU.

    Attributes:
        weights: parameters, as they are kept between steps.
        codes: FP8 copies and transposes of weights.
        gradients: of parameters.
        moments: of Adam.
        activations: that backward needs.
        working: what one block, one gather or the logits need for a moment.
        reserved: context and fragments.
    """

    weights: float
    codes: float
    gradients: float
    moments: float
    activations: float
    working: float
    reserved: float = RESERVED

    @property
    def total(self) -> float:
        """Peak."""
        parts = (self.weights, self.codes, self.gradients, self.moments, self.activations, self.working, self.reserved)
        return sum(parts)


def training_memory(job: TrainingJob, recompute: Recompute) -> Memory:
    """Return the memory of a step with a recomputation policy."""
    layout, precision = job.layout, job.precision
    dense, experts = _local_parameters(job)
    local = dense + experts
    sharded = dense / layout.shard_ranks + experts / max(1.0, layout.shard_ranks * layout.tp / (layout.ep * layout.etp))
    trained = 0.0 if job.frozen else 1.0
    gathers = layout.sharding == Sharding.FSDP
    weights = _weight_bytes(job, local, sharded)
    divides_gradients = layout.sharding in (Sharding.FSDP, Sharding.ZERO2)
    gradients = (4.0 * sharded if divides_gradients else 2.0 * local) * trained  # Megatron reduces them in BF16
    moment_bytes = 2.0 if precision.stores_codes else 8.0
    moments = moment_bytes * (local if layout.sharding == Sharding.DDP else sharded) * trained
    if job.bf16_states:
        weights, gradients, moments = (each / 2 for each in (weights, gradients, moments))
    codes = 0.0 if precision.is_bf16 or gathers else 1.0 * local
    return Memory(
        weights=weights,
        codes=codes,
        gradients=gradients,
        moments=moments,
        activations=_activations(job, recompute),
        working=_working(job, recompute, local, gathers=gathers),
    )


def _weight_bytes(job: TrainingJob, local: float, sharded: float) -> float:
    """Bytes of weights: a BF16 copy that stays unless FSDP gathers it for each use, and FP32 for the optimizer."""
    if job.layout.sharding == Sharding.DDP:
        return 6.0 * local
    masters = 0.0 if job.frozen else 4.0 * sharded
    if job.layout.sharding == Sharding.FSDP:
        return 2.0 * sharded if job.frozen else masters
    return 2.0 * local + masters


def recomputed_share(job: TrainingJob) -> tuple[Recompute, float]:
    """Return the policy of most blocks, and the share of blocks that are computed again as a whole.

    A job without a policy recomputes as little as lets it fit into 95 % of its GPU's memory: nothing, then norms and
    activation functions, then as many whole blocks as it takes.
    """
    if job.recompute is not None:
        # torchtitan's selective policy keeps every other matrix product
        again = 0.5 if job.recompute == Recompute.SELECTIVE and job.framework == Framework.TITAN else 0.0
        return job.recompute, 1.0 if job.recompute == Recompute.FULL else again
    room = 0.95 * job.hardware.memory * GB
    totals = {policy: training_memory(job, policy).total for policy in Recompute}
    if totals[Recompute.NONE] <= room:
        return Recompute.NONE, 0.0
    most, least = totals[Recompute.SELECTIVE], totals[Recompute.FULL]
    share = (most - room) / max(most - least, 1.0)
    return Recompute.SELECTIVE, min(1.0, max(0.0, share))


def planned_memory(job: TrainingJob) -> Memory:
    """Return the memory of a step with the recomputation of :func:`recomputed_share`."""
    policy, share = recomputed_share(job)
    base, full = training_memory(job, policy), training_memory(job, Recompute.FULL)
    activations = base.activations + share * (full.activations - base.activations)
    return replace(base, activations=activations, working=max(base.working, full.working if share else 0.0))


def _local_parameters(job: TrainingJob) -> tuple[float, float]:
    """Parameters of one GPU before sharding: of dense layers and embeddings, and of experts."""
    layout, model = job.layout, job.model
    experts = sum(linear.parameters for linear in model.linears() if linear.part == Part.EXPERTS)
    dense = model.parameters - experts
    return dense / (layout.tp * layout.pp), experts / (layout.ep * layout.etp * layout.pp)


def _block_bytes(job: TrainingJob, recompute: Recompute) -> float:
    """Bytes that the blocks keep for backward, summed over all layers, for one token."""
    model, fp8 = job.model, not job.precision.is_bf16 and job.precision.kernel != Kernel.FP4
    fused = job.framework not in (Framework.EAGER, Framework.COMPOSER)
    operand = 1.0 if fp8 or job.precision.kernel == Kernel.FP4 else 2.0
    codes = job.precision.stores_codes
    hidden = model.hidden
    stream = 2.0 * hidden * model.streams
    if recompute == Recompute.FULL:
        return stream * (model.attention_count + model.mlp_count) / 2 + stream * model.mamba_layers
    total = 0.0
    for linear in model.linears():
        if linear.part == Part.HEAD:
            continue
        times = linear.count * linear.copies
        keeps_input = not (recompute == Recompute.SELECTIVE and linear.name.endswith("down"))
        total += times * linear.k * operand * (1 if keeps_input else 0)
        is_up = linear.name.endswith("up")
        if is_up:
            kept = 1.0 if codes else 2.0
            total += times * linear.n * kept * (1.0 if fused or codes else 1.5 if model.gated else 2.0)
        elif linear.name not in ("out", "o_a", "o_b", "expert_down", "shared_down", "down", "mamba_out"):
            total += times * linear.n * 2.0
    norms = model.attention_count + model.mlp_count + model.mamba_layers
    total += norms * (1.0 if codes else 2.0) * hidden * (0 if recompute == Recompute.SELECTIVE else 1)
    if not fused and not codes:
        total += norms * 4.0 * hidden  # eager norms keep their input in FP32
    return total


def _activations(job: TrainingJob, recompute: Recompute) -> float:
    layout = job.layout
    in_flight = 1.0 if layout.pp == 1 else 1.0 + (layout.pp - 1) / (layout.pp * layout.vp)
    waiting = min(in_flight, job.micro_batches / layout.pp * 1.0 + 1) if layout.pp > 1 else 1.0
    return job.tokens * _block_bytes(job, recompute) / layout.tp * waiting


def _working(job: TrainingJob, recompute: Recompute, local: float, *, gathers: bool) -> float:
    model, layout = job.model, job.layout
    blocks = max(1, model.attention_count, model.mlp_count)
    logits = min(job.tokens, 8192) * model.vocab / layout.tp * 8.0
    block = 0.0
    if recompute == Recompute.FULL:
        block = job.tokens * _block_bytes(job, Recompute.NONE) / blocks / layout.tp
    gathered = 2 * 2.0 * local / blocks if gathers else 0.0
    return max(logits, block) + gathered
