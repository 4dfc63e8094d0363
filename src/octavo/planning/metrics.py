"""From seconds to the metric that a row was published in: "tokens_per_s_per_gpu", "latency_us", "tflops".

A metric is read as words. All of them must be known for its kind, so that a rate or a unit that the planner does not
predict is refused instead of answered in another unit; what stands in parentheses may be a unit, or anything.
"""

import re
from collections.abc import Callable, Set

from octavo.errors import ConfigError
from octavo.planning.jobs import GemmJob, GemmPass, ServingJob, TrainingJob
from octavo.planning.rows import Row
from octavo.planning.serving_costs import requests_in_flight
from octavo.planning.training_memory import Memory

__all__ = ["Measure", "is_speedup", "memory_measure", "product_measure", "service_measure", "step_measure"]

Measure = Callable[[float], float]
SECONDS = frozenset({"s", "sec", "second", "seconds"})
GPUS = frozenset({"gpu", "gpus", "device", "chip"})
AVERAGES = frozenset({"mean", "median", "average", "avg"})
TOKENS = frozenset({"tokens", "token", "tok", "toks"})
REQUESTS = frozenset({"requests", "request", "req", "reqs"})
ALIASES = {"tps": "tokens s", "tgs": "tokens s gpu", "qps": "requests s", "rps": "requests s", "msec": "ms"}
SAMPLES = frozenset({"samples", "sample", "sequences", "sequence"})
PER = frozenset({"per", "throughput"}) | SECONDS | GPUS | AVERAGES
STEPS = frozenset({"step", "iter", "iteration", "train", "training"})
STEPS_A_SECOND = re.compile(r"(?:steps?|iters?|iterations?|it) ?(?:/|per) ?(?:s|sec|second)\b")
TIME = frozenset({"time", "latency", "duration", "elapsed"}) | AVERAGES
PASSES = frozenset(
    {"fwd", "bwd", "forward", "backward", "and", "total", "sum", "dgrad", "wgrad", "fprop", "kernel", "gemm"}
)
TOKEN_TIME = frozenset({"tpot", "itl", "inter", "token", "output", "per"})
SPEEDUP = frozenset({"speedup", "speed", "ratio"})
OF_SPEEDUP = frozenset({"up", "vs", "over", "bf", "16", "fp", "8", "throughput", "end", "to", "layer"})
FLOPS = frozenset({"tflops", "tflop", "model", "per"}) | SECONDS | GPUS | AVERAGES
UNITS = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "min": 1 / 60, "h": 1 / 3600, "hours": 1 / 3600}
UNITS |= dict.fromkeys(SECONDS, 1.0)
BYTES = {"gb": 1e9, "gib": 1024.0**3, "mb": 1e6, "mib": 1024.0**2}
ANY_UNIT = {*UNITS, *BYTES, "%"}
MEMORY = frozenset({"mem", "memory", "peak", "max", "per", "used", "allocated", "reserved"}) | GPUS
MEMORY_PARTS: dict[str, Callable[[Memory], float]] = {
    "optimizer": lambda memory: memory.moments,
    "activation": lambda memory: memory.activations,
    "activations": lambda memory: memory.activations,
}


def words_of(row: Row) -> frozenset[str]:
    """Return the words of a row's metric; of what stands in parentheses, a unit alone."""
    text = re.sub(r"\((.*?)\)", lambda match: f" {match[1]} " if match[1].strip() in ANY_UNIT else " ", _metric(row))
    words = re.findall(r"[a-zµ%]+|\d+", text)
    return frozenset(" ".join(ALIASES.get(word, word) for word in words).split())


def _metric(row: Row) -> str:
    return row["metric"].lower().replace("_", " ")


def is_speedup(row: Row) -> bool:
    """Return whether the metric is a speed-up over BF16."""
    words = words_of(row)
    return bool(words & SPEEDUP) and words <= SPEEDUP | OF_SPEEDUP | PASSES | STEPS | AVERAGES


def _refused(row: Row, kind: str, known: str) -> ConfigError:
    said = f"the metric {row['metric']!r}" if row["metric"] else "a row without a metric"
    return ConfigError(f"{said} is not predicted for {kind}; {known} are, with their unit")


def _time_unit(words: frozenset[str], known: Set[str]) -> float | None:
    """Units in a second, if the words are a time of something known and name one unit."""
    units = words & set(UNITS)
    return UNITS[next(iter(units))] if len(units) == 1 and words - units <= known else None


def memory_measure(row: Row) -> Callable[[Memory], float] | None:
    """Return how a row's memory follows from a step's, in the row's unit; None if its metric is no memory.

    Raises:
        ConfigError: it is a memory, and not one that is predicted.
    """
    words = words_of(row)
    if not words & {"mem", "memory"}:
        return None
    units, parts = words & set(BYTES), words & set(MEMORY_PARTS)
    if len(units) != 1 or len(parts) > 1 or words - units - parts - MEMORY:
        raise _refused(row, "the memory of a step", "peak, optimizer and activation memory in GB or GiB")
    unit = BYTES[next(iter(units))]
    part = MEMORY_PARTS[next(iter(parts))] if parts else lambda memory: memory.total
    return lambda memory: part(memory) / unit


def step_measure(row: Row, job: TrainingJob) -> Measure:
    """Return how a row's value follows from the seconds of a step.

    Raises:
        ConfigError: its metric is not one that is predicted.
    """
    words, gpus = words_of(row), job.layout.gpus
    tokens = job.micro_batches * job.micro_batch * job.layout.dp * job.seq
    flops = tokens * job.model.training_flops(job.seq) / gpus
    if words & {"tflops", "tflop"} and words <= FLOPS:
        return lambda seconds: flops / 1e12 / seconds
    if "mfu" in words and words <= {"mfu", "%", "percent", "pct"}:
        peak = job.hardware.peak(16) / (100.0 if len(words) > 1 else 1.0)
        return lambda seconds: flops / (seconds * peak)
    if STEPS_A_SECOND.search(_metric(row)):
        return lambda seconds: 1.0 / seconds
    rate = _rate_of_step(words, row, job, tokens)
    if rate is not None:
        return lambda seconds: rate / seconds
    if steps := re.fullmatch(r"hours_for_(\d+)_\w+", row["metric"].lower()):
        return lambda seconds: seconds * float(steps.group(1)) / 3600
    unit = _time_unit(words, STEPS | TIME | {"per"})
    if unit is None or not words & STEPS or "to" in words:
        raise _refused(row, "training", "step time, tokens or samples a second, TFLOP/s, MFU and memory")
    return lambda seconds: seconds * unit


def _rate_of_step(words: frozenset[str], row: Row, job: TrainingJob, tokens: int) -> float | None:
    """Tokens or samples of a step, of one GPU where the row says so; None if the metric is no such rate."""
    if not words & SECONDS:
        return None
    share = job.layout.gpus if words & GPUS else 1
    if words & TOKENS and words <= TOKENS | PER:
        # torchtitan logs tokens of one GPU
        return tokens / (job.layout.gpus if "as logged" in row["metric"].lower() else share)
    if words & SAMPLES and words <= SAMPLES | PER:
        return tokens / job.seq / share
    return None


def service_measure(row: Row, job: ServingJob) -> Measure:
    """Return how a row's value follows from the seconds of a generated token; "tokens" may count prompts too.

    Raises:
        ConfigError: its metric is not one that is predicted.
    """
    words = words_of(row)
    share = job.gpus if words & GPUS else 1 / job.replicas
    if words & SECONDS and words & TOKENS and words <= TOKENS | PER | {"output", "total", "generated"}:
        # vLLM counts prompts; ROCm's page gives generated tokens of it
        text = f"{row.source} {row['source_path_or_url']} {row.notes}".lower()
        of_vllm = not words & {"output", "generated"} and "vllm" in text and "rocm" not in text
        counted = (job.prompt + job.answer) / job.answer if of_vllm or "total" in words else 1.0
        return lambda seconds: counted / share / seconds
    if words & SECONDS and words & REQUESTS and words <= REQUESTS | PER:
        return lambda seconds: 1.0 / job.answer / share / seconds
    requests = requests_in_flight(job)
    if words & SECONDS and words & TOKENS and "user" in words and words <= TOKENS | {"per", "s", "user", "output"}:
        return lambda seconds: 1.0 / requests / seconds
    of_token = _time_unit(words, TIME | TOKEN_TIME)
    if of_token is not None and words & {"tpot", "itl", "token"}:
        return lambda seconds: seconds * requests * of_token
    unit = _time_unit(words, TIME | {"request", "end", "to", "e", "2"})
    if unit is None or not words & {"time", "latency"} or ("to" in words and "end" not in words):
        raise _refused(row, "inference", "tokens and requests a second, time between tokens, and latency of a request")
    return lambda seconds: seconds * requests * job.answer * unit


def product_measure(row: Row, job: GemmJob) -> Measure:
    """Return how a row's value follows from the seconds of products.

    Raises:
        ConfigError: its metric is not one that is predicted.
    """
    words = words_of(row)
    if words & {"tflops", "tflop"} and words <= FLOPS | PASSES:
        passes = 3.0 if job.passes in (GemmPass.ALL, GemmPass.SUM) else 1.0
        flops = passes * sum(2.0 * m * n * k for m, n, k in job.shapes) * job.groups / 1e12
        return lambda seconds: flops / seconds
    if words & TOKENS and words & SECONDS and words <= TOKENS | PER | PASSES:
        return lambda seconds: job.shapes[0][0] * job.groups / seconds
    unit = _time_unit(words, TIME | PASSES | {"layer"})
    if unit is None:
        raise _refused(row, "matrix products", "times, TFLOP/s and tokens a second")
    return lambda seconds: seconds * unit
