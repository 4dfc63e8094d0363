"""Memory of a training step on the GPU that has most of it.

Weights, gradients and moments follow the sharding; activations are counted tensor by tensor for each recomputation
policy, an FP8 GEMM keeping its input as codes. Compiled frameworks fuse norms and activation functions and keep less.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from octavo.planning.jobs import Framework, Layout, Recompute, Sharding, TrainingJob
from octavo.planning.model_shapes import Linear, Part
from octavo.planning.precision import linear_precision, weight_copies

__all__ = ["Memory", "activation_bytes", "planned_memory", "recomputed_share", "training_memory"]

# Bytes of the CUDA context, communication buffers and fragments: what COAT's table leaves unexplained. On that table
# the planner's memory is judged in-sample; the peaks that other rows' notes name gave no constant.
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


@lru_cache(maxsize=1024)  # a search asks for a step's memory, its recomputation and its time, which all need it
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
    return Memory(
        weights=weights,
        codes=0.0 if gathers else _code_bytes(job),
        gradients=gradients,
        moments=moments,
        activations=sum(activation_bytes(job, recompute).values()),
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


def _code_bytes(job: TrainingJob) -> float:
    """Bytes of the weights' FP8 copies that a GPU keeps: of the linear layers that the precision covers."""
    layout, precision = job.layout, job.precision
    ranks = {Part.EXPERTS: layout.ep * layout.etp * layout.pp}
    covered = [each for each in job.model.linears() if not linear_precision(precision, each).is_bf16]
    local = sum(each.parameters / ranks.get(each.part, layout.tp * layout.pp) for each in covered)
    return weight_copies(precision, job.hardware) * precision.bits / 8 * local


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


def activation_bytes(job: TrainingJob, recompute: Recompute) -> dict[str, float]:
    """Return the bytes that a GPU's blocks keep for backward, by what keeps them: kinds of layers, norms, or blocks.

    Example:
        >>> from octavo.planning import PlanRequest, find_hardware, find_model, fitted_constants, make_plan
        >>> request = PlanRequest(model=find_model("llama-3-8b"), hardware=find_hardware("h100"), gpus=64)
        >>> step = make_plan(request, fitted_constants()).bf16.job
        >>> kept = activation_bytes(step, Recompute.NONE)
        >>> max(kept, key=kept.get), kept["down"] == 2 * 14336 * 32 * step.tokens
        ('up', True)
    """
    layout = job.layout
    tokens = job.tokens * _micro_batches_kept(layout, job.micro_batches) / layout.tp
    return {name: tokens * each for name, each in _token_bytes(job, recompute).items()}


def _micro_batches_kept(layout: Layout, micro_batches: int) -> float:
    """Activations that a pipeline's first stage keeps, as a share of what one micro-batch makes in all layers.

    Korthikanti et al., arXiv 2205.05198: ``pp`` micro-batches wait on a stage, of a share 1/pp of the layers each;
    with interleaved stages ``pp - 1`` more of their parts. There are no more than the step has.
    """
    parts = layout.pp * layout.vp
    waiting = parts if layout.vp == 1 else parts + layout.pp - 1
    return min(waiting, micro_batches * layout.vp) / parts


def _token_bytes(job: TrainingJob, recompute: Recompute) -> dict[str, float]:
    """Bytes that all blocks keep of one token, by what keeps them."""
    model = job.model
    if recompute == Recompute.FULL:
        stream = 2.0 * model.hidden * model.streams
        return {"inputs of blocks": stream * ((model.attention_count + model.mlp_count) / 2 + model.mamba_layers)}
    kept = {
        linear.name: linear.count * linear.copies * _layer_bytes(job, linear, recompute)
        for linear in model.linears()
        if linear.part != Part.HEAD
    }
    codes = job.precision.stores_codes
    norms = model.attention_count + model.mlp_count + model.mamba_layers
    width = 0.0 if recompute == Recompute.SELECTIVE else 1.0 if codes else 2.0
    # eager norms keep their input in FP32; llm-foundry's are low_precision_layernorm
    width += 4.0 if job.framework == Framework.EAGER and not codes else 0.0
    return kept | {"norms": norms * width * model.hidden}


def _is_fused(job: TrainingJob) -> bool:
    """Return whether norms and activation functions are fused kernels."""
    return job.framework not in (Framework.EAGER, Framework.COMPOSER)


def _layer_bytes(job: TrainingJob, linear: Linear, recompute: Recompute) -> float:
    """Bytes that one linear layer, and what follows it, keep of one token: its input, and its output if it is used."""
    codes, operand = job.precision.stores_codes, 2.0 if job.precision.is_bf16 else 1.0
    is_computed_again = recompute == Recompute.SELECTIVE and linear.name.endswith("down")
    kept = 0.0 if is_computed_again else linear.k * operand
    if linear.name.endswith("up"):
        times = 1.5 if job.model.gated and not (_is_fused(job) or codes) else 1.0  # silu's output beside gate and up
        return kept + linear.n * (1.0 if codes else 2.0) * times
    if linear.name in ("out", "o_a") and not job.precision.is_bf16:
        return kept + linear.k * 2.0  # attention's own copy of its output, which BF16 shares with the linear layer
    if linear.name in ("out", "o_a", "o_b", "expert_down", "shared_down", "down", "mamba_out"):
        return kept
    return kept + linear.n * 2.0


def _working(job: TrainingJob, recompute: Recompute, local: float, *, gathers: bool) -> float:
    """Bytes of a moment: logits of all tokens, a block that is computed again, its widest gradients, gathered tensors.

    They are added although not all live at once: the allocator keeps what one took, and serves other sizes badly.
    """
    model, layout = job.model, job.layout
    blocks = max(1, model.attention_count, model.mlp_count)
    again = sum(_token_bytes(job, Recompute.NONE).values()) / blocks if recompute == Recompute.FULL else 0.0
    widest = max(2.0 * linear.copies * (linear.n + linear.k) for linear in model.linears() if linear.part != Part.HEAD)
    divided = again + widest + _logit_bytes(job) * model.vocab
    # sequence parallelism gathers a layer's input and its output's gradient; fused with the GEMM, neither is kept
    whole = 4.0 * model.hidden if layout.tp > 1 and not job.overlaps_tp else 0.0
    gathered = 2 * 2.0 * local / blocks if gathers else 0.0
    return job.tokens * (divided / layout.tp + whole) + gathered


def _logit_bytes(job: TrainingJob) -> float:
    """Bytes that the loss needs of one logit.

    One fused kernel keeps the logit in BF16, FP32 and its gradient in BF16. Separate operations, as PyTorch's eager
    cross-entropy and its ``loss_parallel`` are, keep three tensors in FP32 beside the logit; llm-foundry's is fused.
    """
    is_parallel = job.framework == Framework.TITAN and job.layout.tp > 1
    has_separate_operations = job.framework == Framework.EAGER or is_parallel
    return 14.0 if has_separate_operations else 8.0
