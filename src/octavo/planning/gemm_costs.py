"""Seconds of matrix products and casts at the limits of an accelerator.

A product [M, K] × [K, N] takes the longer of its FLOPs at the vendor's peak and its bytes at the memory's bandwidth.
Its FLOPs run in waves of output tiles, one on each multiprocessor, and the last wave may be partly empty; kernels that
divide K among multiprocessors fill half of what would be lost. Costs are kept apart by kind, since each kind reaches a
share of its limit that is fitted.
"""

import math
from collections import defaultdict
from functools import lru_cache

from octavo.planning.hardware import Hardware
from octavo.planning.jobs import GemmJob, GemmPass
from octavo.planning.precision import BF16, Kernel, Precision, RoleBytes, bytes_cast, cast_kernels

__all__ = ["Parts", "add_gemm", "gemm_parts", "kernel_part", "wave_efficiency"]

Parts = defaultdict[str, float]  # seconds, and some counts, by kind
TILES = ((128, 256), (256, 128), (128, 128), (64, 128))  # rows and columns; the largest that keeps waves full is used
FLOPS_A_BYTE = {tile: math.prod(tile) / sum(tile) for tile in TILES}
GRADIENTS = (GemmPass.GRAD_INPUT, GemmPass.GRAD_WEIGHT)
PASSES = {GemmPass.BACKWARD: GRADIENTS} | dict.fromkeys((GemmPass.ALL, GemmPass.SUM), (GemmPass.FORWARD, *GRADIENTS))
MMA_COLUMNS = 8  # of the narrowest MMA, to which the few rows of a decoding step are transposed
EPILOGUE_BITS = 4000.0  # bits of K whose products take as long as a tile's prologue and epilogue


@lru_cache(maxsize=1 << 16)  # a search asks again for every recipe
def wave_efficiency(shape: tuple[int, int, int], processors: int, *, groups: int = 1, bits: int = 16) -> float:
    """Return the share of a GEMM's time in which multiprocessors compute, from above 0 to 1.

    Args:
        shape: M, N and K of one group.
        processors: multiprocessors of the GPU.
        groups: of a grouped GEMM.
        bits: of an operand's element.

    Example:
        >>> wave_efficiency((8192, 8192, 8192), 132) > 0.9 > 0.3 > wave_efficiency((64, 512, 512), 132)
        True
    """
    m, n, k = shape
    best = 0.0
    for rows, columns in TILES:
        tiles = groups * math.ceil(m / rows) * math.ceil(n / columns)
        waves = tiles / processors
        filled = waves / math.ceil(waves)
        useful = (m / rows / math.ceil(m / rows)) * (n / columns / math.ceil(n / columns))
        reuse = min(1.0, FLOPS_A_BYTE[rows, columns] / FLOPS_A_BYTE[TILES[0]]) ** 0.5
        best = max(best, (filled + 1) / 2 * useful * reuse if tiles > processors else filled**0.5 * useful * reuse)
    return best * k / (k + EPILOGUE_BITS / bits)


def kernel_part(kernel: Kernel, hardware: Hardware, *, is_grouped: bool = False) -> str:
    """Return the kind of cost that a GEMM's seconds at peak belong to."""
    generation = hardware.generation if hardware.generation in ("blackwell", "cdna") else "hopper"
    return f"gemm_{kernel}_{generation}" + ("_grouped" if is_grouped else "")


def add_gemm(
    parts: Parts,
    shape: tuple[int, int, int],
    precision: Precision,
    hardware: Hardware,
    *,
    groups: int = 1,
    times: float = 1.0,
    is_grouped: bool | None = None,
) -> None:
    """Add the seconds of ``times`` GEMMs of one shape to ``parts``.

    Args:
        parts: seconds by kind.
        shape: M, N and K of one group.
        precision: of the operands.
        hardware: that multiplies.
        groups: of a grouped GEMM.
        times: how many.
        is_grouped: whether a grouped kernel multiplies; None for whenever there are several groups.
    """
    m, n, k = shape
    if min(shape) < 1 or times <= 0:
        return
    bits, kernel = precision.bits, precision.kernel
    efficiency = wave_efficiency(shape, hardware.processors, groups=groups, bits=bits)
    computing = 2.0 * m * n * k * groups / (hardware.peak(bits) * efficiency)
    if precision.integer:
        computing = _integer_seconds(shape, hardware, efficiency) * groups
    reading = groups * ((m * k * bits + n * k * precision.stored_bits) / 8 + 2.0 * m * n) / (hardware.bandwidth * 1e9)
    # A power mean: a product near both limits is slower than either.
    seconds = (computing**4 + reading**4) ** 0.25
    limited = computing**4 / (computing**4 + reading**4)  # by FLOPs; the rest waits for memory
    grouped = groups > 1 if is_grouped is None else is_grouped
    parts[kernel_part(kernel, hardware, is_grouped=grouped and kernel != Kernel.DEEPGEMM)] += times * seconds * limited
    parts["reading"] += times * seconds * (1 - limited)
    parts["launches"] += times


def _integer_seconds(shape: tuple[int, int, int], hardware: Hardware, efficiency: float) -> float:
    """Seconds of one INT8 product's FLOPs.

    Units that are slower than FP8's (B300's, 30 times) keep up with any tile: they are busy with the rows of whole
    MMAs, while waves and tiles cost what they cost in FP8.
    """
    m, n, k = shape
    fed = 2.0 * m * n * k / (max(hardware.int8, hardware.fp8) * 1e12 * efficiency)
    busy = 2.0 * MMA_COLUMNS * math.ceil(m / MMA_COLUMNS) * n * k / (hardware.int8 * 1e12)
    return max(fed, busy)


def gemm_parts(job: GemmJob) -> Parts:
    """Return the ideal seconds, by kind, of linear layers measured alone, or of one transformer layer."""
    parts: Parts = Parts(float)
    moved = bytes_cast(job.precision)
    for m, n, k in job.shapes:
        columns = n // job.ranks
        _add_passes(parts, job, (m, columns, k))
        _add_casts(parts, job, (m, columns, k), moved)
    if job.attention is not None:
        _add_layer(parts, job)
    return parts


def _add_passes(parts: Parts, job: GemmJob, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    shapes = {
        GemmPass.FORWARD: (m, n, k),
        GemmPass.GRAD_INPUT: (m, k, n),
        GemmPass.GRAD_WEIGHT: (n, k, m),
    }
    for name, each in shapes.items():
        if name in PASSES.get(job.passes, (job.passes,)):
            precision = BF16 if name == GemmPass.GRAD_WEIGHT and job.precision.hp_grad_weight else job.precision
            add_gemm(parts, each, precision, job.hardware, groups=job.groups, is_grouped=job.is_grouped)


def _add_casts(parts: Parts, job: GemmJob, shape: tuple[int, int, int], moved: RoleBytes) -> None:
    """Casts of a measured pass: it needs two of the three roles; all passes share what they cast."""
    m, n, k = shape
    sizes = {
        "input": m * job.groups * k * moved.input,
        "weight": 0.0 if job.weight_cached else n * job.groups * k * moved.weight,
        "grad_output": m * job.groups * n * moved.grad_output,
    }
    roles: dict[GemmPass, tuple[str, ...]] = {
        GemmPass.FORWARD: ("input", "weight"),
        GemmPass.GRAD_INPUT: ("grad_output", "weight"),
        GemmPass.GRAD_WEIGHT: ("grad_output", "input"),
    }
    if job.passes == GemmPass.BACKWARD:
        roles[GemmPass.BACKWARD] = tuple(sizes)
    used = roles.get(job.passes, tuple(sizes) if job.passes == GemmPass.ALL else sum(roles.values(), ()))
    share = 1.0 if job.passes == GemmPass.ALL else 0.75  # a pass by itself writes one orientation of the two
    total = sum(sizes[name] for name in used) * share
    parts["cast"] += total / (job.hardware.bandwidth * 1e9)
    parts["launches"] += len(used) * cast_kernels(job.precision)


def _add_layer(parts: Parts, job: GemmJob) -> None:
    """Attention and elementwise work of one transformer layer, forward and backward."""
    assert job.attention is not None
    tokens, heads, head_dim, seq = job.attention
    flops = 3.5 * 2.0 * tokens * heads * 2 * head_dim * seq / 2
    parts["attention"] += flops / job.hardware.peak(16)
    widths = sum(k + 2 * n for _, n, k in job.shapes)
    parts["memory"] += 2.0 * 2 * tokens * widths / (job.hardware.bandwidth * 1e9)
    parts["launches"] += 60
