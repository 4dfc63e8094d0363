"""Ideal seconds of inference by kind, for one generated token of all requests together.

A replica decodes all its requests in steps, and computes prompts in between. A step reads every weight and every
request's keys and values once; a prompt is limited by FLOPs. How many requests are in flight follows from memory:
what weights leave is filled with keys and values, and with the states of Mamba and linear attention.
"""

import math
from dataclasses import replace

from octavo.errors import ConfigError
from octavo.planning.gemm_costs import Parts, add_gemm
from octavo.planning.jobs import Framework, ServingJob
from octavo.planning.model_shapes import Linear, Part, Split
from octavo.planning.precision import BF16, Kernel, Precision

__all__ = ["kept_positions", "kv_bytes", "requests_in_flight", "serving_parts", "weight_bytes"]

USABLE = 0.9  # of a GPU's memory, as servers' defaults have it
MOST_REQUESTS = {Framework.TRTLLM: 2048, Framework.VLLM: 1024}
CHUNK = 8192  # tokens of prompts that are computed at once


def weight_bytes(job: ServingJob) -> float:
    """Return the bytes of all weights; embedding and head stay in BF16, and what the precision does not cover."""
    model = job.model
    embeddings = model.vocab * model.hidden * (1 if model.tied else 2)
    experts = sum(linear.parameters for linear in model.linears() if linear.part == Part.EXPERTS)
    dense = model.parameters - embeddings - experts
    copies = job.gpus if job.divides_experts else 1  # attention to different requests needs all of its weights
    bits = [_precision_of(job, part).stored_bits for part in (Part.EXPERTS, Part.MLP)]
    return (experts * bits[0] + copies * dense * bits[1]) / 8 + 2.0 * embeddings * copies


def _precision_of(job: ServingJob, part: Part) -> Precision:
    """The precision of a part; a mixture's may cover its experts alone, or all but them."""
    if part == Part.HEAD:
        return BF16
    return (
        job.precision
        if job.precision.covers(part) or not job.model.experts
        else replace(BF16, kv_bytes=job.precision.kv_bytes)
    )


def kv_bytes(job: ServingJob, positions: float) -> float:
    """Return the bytes that a request keeps at a length, on all GPUs: keys and values, and states of other mixers.

    Windowed layers keep their window. Tensor-parallel ranks divide states, as vLLM does.
    """
    model = job.model
    copies = max(1.0, job.tp / model.key_heads) if not model.kv_rank else job.tp
    copies = 1.0 if job.divides_experts else copies
    layers = model.attention_count - model.mtp_layers
    windowed = min(layers, model.windowed_layers)
    kept = (layers - windowed) * positions + windowed * min(positions, model.window or positions)
    return model.kv_width * kept * job.precision.kv_bytes * copies + model.state_bytes


def kept_positions(job: ServingJob) -> float:
    """Return the positions of a request by which memory is filled: not all requests are at their end at once."""
    return job.prompt + 0.6 * job.answer


def requests_in_flight(job: ServingJob) -> int:
    """Return how many requests are decoded together: those that were given, or as many as memory holds.

    Raises:
        ConfigError: the weights do not fit, or no request does.
    """
    free = job.gpus * USABLE * job.hardware.memory * 1e9 - weight_bytes(job) - 1.5e9 * job.gpus
    room = int(free / kv_bytes(job, kept_positions(job)))
    if room < 1:
        raise ConfigError(
            f"{job.model.name} in {job.precision.name} does not fit into {job.gpus} × {job.hardware.memory:g} GB with "
            f"a request of {job.prompt + job.answer:,} tokens; use more GPUs"
        )
    most = job.requests or MOST_REQUESTS.get(job.framework, 1024) * (job.gpus if job.divides_experts else 1)
    return min(room, most)


def serving_parts(job: ServingJob) -> Parts:
    """Return the ideal seconds by kind that one generated token takes, of the replica's time."""
    requests = requests_in_flight(job)
    parts: Parts = Parts(float)
    _add_pass(parts, job, tokens=requests, share=1.0 / requests, prefix="decode")
    chunk = max(CHUNK, job.prompt) if job.prompt * requests > CHUNK else job.prompt * requests
    _add_pass(parts, job, tokens=chunk, share=job.prompt / chunk / job.answer, prefix="prompt")
    positions = job.prompt + job.answer / 2
    per_gpu = (kv_bytes(job, positions) + job.model.state_bytes) / job.gpus  # a step reads states, and writes them
    parts["decode_keys"] += per_gpu / (job.hardware.bandwidth * 1e9)
    flops = job.model.attention_flops(job.prompt) * job.prompt / job.answer / job.gpus
    parts["prompt_attention"] += flops / job.hardware.peak(16)
    parts["requests"] = requests / (job.gpus if job.divides_experts else 1)
    parts["scheduler"] += 1.0 / job.answer + 1.0 / 256
    parts[f"framework_{job.framework}"] = 1.0
    parts["framework_divided_experts"] = 1.0 if job.divides_experts else 0.0
    parts["years"] = job.release - 2025 if job.release else 0.0
    return parts


def _add_pass(parts: Parts, job: ServingJob, *, tokens: int, share: float, prefix: str) -> None:
    """Add the forward pass of ``tokens`` rows, of which one generated token is charged a share."""
    found: Parts = Parts(float)
    model, count = job.model, 0.0
    for linear in model.linears():
        precision = _precision_of(job, linear.part)
        rows, n, k, groups = _local(job, linear, tokens)
        if linear.part == Part.HEAD and prefix == "prompt":
            continue
        add_gemm(found, (rows, n, k), precision, job.hardware, groups=groups, times=linear.count)
        count += linear.count
    launches = found.pop("launches", 0.0)
    parts[f"{prefix}_gemm"] += sum(found.values()) * share
    parts[f"{prefix}_launches"] += (launches + 3 * model.layers) * share
    wide = sum(linear.count * linear.copies * (linear.n + linear.k) for linear in model.linears())
    if job.precision.kernel == Kernel.ROW:  # scales of rows are measured while serving; those of tensors are known
        wide += sum(linear.count * linear.copies * linear.k for linear in model.linears())
    own_rows = tokens / (job.gpus if job.divides_experts else job.tp)
    parts[f"{prefix}_memory"] += 4.0 * wide * own_rows * share / (job.hardware.bandwidth * 1e9)
    if job.gpus > 1:
        blocks = (model.attention_count + model.mlp_count - 2 * model.mtp_layers) * share
        width = (
            2.0 * model.hidden * tokens * (2.0 * min(model.top_k or 1, 4) / job.gpus if job.divides_experts else 2.0)
        )
        parts[f"{prefix}_exchange"] += blocks * width * (job.gpus - 1) / job.gpus / job.hardware.rate(job.gpus)
        parts["exchanges"] += blocks


def _local(job: ServingJob, linear: Linear, tokens: int) -> tuple[int, int, int, int]:
    """Rows, N, K and groups of one GPU's product."""
    is_routed = linear.part == Part.EXPERTS
    ranks = job.tp
    if job.divides_experts:  # experts are divided, everything else is replicated and sees its share of the requests
        rows = tokens * linear.copies / job.gpus
        used = max(1, min(linear.groups // job.gpus, math.ceil(rows))) if is_routed else 1
        return max(1, round(rows / used)), linear.n, linear.k, used
    n = linear.n // ranks if linear.split == Split.COLUMN else linear.n
    k = linear.k // ranks if linear.split == Split.ROW else linear.k
    used = min(linear.groups, tokens * linear.copies) if is_routed else 1
    return max(1, round(tokens * linear.copies / used)), max(1, n), max(1, k), used
