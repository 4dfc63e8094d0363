"""From seconds to the metric that a row was published in: "tokens_per_s_per_gpu", "latency_us", "tflops".

A metric is read as words. All of them must be known for its kind, so that a rate or a unit that the planner does not
predict is refused instead of answered in another unit; what stands in parentheses counts where it is a unit.
"""

import re
from collections.abc import Callable, Set

from octavo.errors import ConfigError
from octavo.planning.gemm_costs import PASSES as PASSES_MULTIPLIED
from octavo.planning.jobs import GemmJob, ServingJob, TrainingJob
from octavo.planning.rows import Row
from octavo.planning.serving_costs import requests_in_flight
from octavo.planning.training_memory import Memory

__all__ = [
    "Measure",
    "is_of_prompts",
    "is_speedup",
    "memory_measure",
    "product_measure",
    "prompt_measure",
    "service_measure",
    "step_measure",
]

Measure = Callable[[float], float]
SECONDS = frozenset({"s", "sec", "second", "seconds"})
GPUS = frozenset({"gpu", "gpus", "device", "chip"})
AVERAGES = frozenset({"mean", "median", "average", "avg"})
TOKENS = frozenset({"tokens", "token", "tok", "toks"})
SAMPLES = frozenset({"samples", "sample", "sequences", "sequence"})
RATES = {"min": 60.0, "minute": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0} | dict.fromkeys(SECONDS, 1.0)
PER = frozenset({"per", "throughput"}) | RATES.keys() | GPUS | AVERAGES
STEPS = frozenset({"step", "iter", "iteration", "train", "training"})
TIME = frozenset({"time", "latency", "duration", "elapsed"}) | AVERAGES
PASSES = frozenset(
    {"fwd", "bwd", "forward", "backward", "and", "total", "sum", "dgrad", "wgrad", "fprop", "kernel", "gemm"}
) | {"grad", "input", "weight"}
TOKEN_TIME = frozenset({"tpot", "itl", "inter", "token", "output", "per"})
SPEEDUP = frozenset({"speedup", "speed", "ratio"})
OF_SPEEDUP = frozenset({"x", "up", "vs", "over", "bf", "16", "fp", "8", "throughput", "end", "to", "layer"})
FLOPS = frozenset({"tflops", "tflop", "model", "per"}) | SECONDS | GPUS | AVERAGES
REQUESTS = frozenset({"requests", "request", "req", "reqs"})
PERCENT = frozenset({"%", "percent", "pct"})
UNITS = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "min": 1 / 60, "h": 1 / 3600, "hours": 1 / 3600}
UNITS |= dict.fromkeys(SECONDS, 1.0)
BYTES = {"gb": 1e9, "gib": 1024.0**3, "mb": 1e6, "mib": 1024.0**2}
MEMORY = frozenset({"mem", "memory", "peak", "max", "per", "used", "allocated", "reserved"}) | GPUS
MEMORY_PARTS: dict[str, Callable[[Memory], float]] = {
    "optimizer": lambda memory: memory.moments,
    "activation": lambda memory: memory.activations,
    "activations": lambda memory: memory.activations,
}


# Words in parentheses that do not change a metric; others count as words of it.
ASIDE = re.compile(
    r"(?:(?:mean|median|average|avg|as logged|header says \w+|all gpus|whole machine|measured|derived|rounded|"
    r"bf16 peak|interactivity|(?:higher|lower) is better)(?:[,; ]+|$))+"
)
A_UNIT = r"(?<![a-z])(ns|us|µs|ms|s|secs?|seconds?|min)(?:[ _]per[ _]| ?/ ?)"
SHORTER = (
    (A_UNIT + r"(?:step|iter(?:ation)?|it)\b", r"step time \1"),
    (A_UNIT + r"(?:output[ _])?token\b", r"tpot \1"),
    (r"(?<![a-z])(?:steps?|iter(?:ation)?s?|it)(?:[ _]per[ _]| ?/ ?)(?:s|sec|second)\b", "step rate"),
    (r"(?<![a-z])[tw]ps(?![a-z])", "tokens s"),
    (r"(?<![a-z])tgs(?![a-z])", "tokens s gpu"),
    (r"time[ _]to[ _]first[ _]token", "ttft"),
)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-zµ%]+|\d+", text))


def words_of(row: Row) -> frozenset[str]:
    """Return the words of a row's metric, those in parentheses too unless they are an aside.

    Example:
        >>> sorted(words_of(Row({"metric": "MFU (%)"}))), sorted(words_of(Row({"metric": "ms/step (as logged)"})))
        (['%', 'mfu'], ['ms', 'step', 'time'])
    """
    text = row["metric"].lower()
    everything = re.compile(rf"{re.escape(row['gpus'].strip()) or 'all'} gpus?")  # "(8 GPUs)" of a row that has eight
    asides = (ASIDE, everything)
    text = re.sub(
        r"\(([^()]*)\)",
        lambda match: " " if any(each.fullmatch(match[1].strip()) for each in asides) else f" {match[1]} ",
        text,
    )
    for pattern, replacement in SHORTER:
        text = re.sub(pattern, replacement, text)
    return _words(text)


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


def _seconds_of_rate(words: frozenset[str]) -> float | None:
    """Seconds that a rate is of, such as 60 of "req/min"; None if the words name no unit of time, or several."""
    units = words & RATES.keys()
    return RATES[next(iter(units))] if len(units) == 1 else None


def memory_measure(row: Row) -> Callable[[Memory], float] | None:
    """Return how a row's memory follows from a step's, in the row's unit; None if its metric is no memory.

    Raises:
        ConfigError: it is a memory, and not one that is predicted.
    """
    words = words_of(row)
    if not words & {"mem", "memory"} and not (words & {"reserved", "allocated"} and words & set(BYTES)):
        return None
    units, parts = words & set(BYTES), words & set(MEMORY_PARTS)
    of_all = bool(re.search(r"(?:all|\d) gpus", row["metric"].lower())) and row.integer("gpus", 1) > 1
    if len(units) != 1 or len(parts) > 1 or words - units - parts - MEMORY or of_all:
        raise _refused(row, "the memory of a step", "peak, optimizer and activation memory of a GPU in GB or GiB")
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
    if "mfu" in words and words <= {"mfu"} | PERCENT:
        peak = job.hardware.peak(16) / (100.0 if len(words) > 1 else 1.0)
        return lambda seconds: flops / (seconds * peak)
    if words == {"step", "rate"}:
        return lambda seconds: 1.0 / seconds
    rate = _rate_of_step(words, row, job, tokens)
    if rate is not None:
        return lambda seconds: rate / seconds
    if steps := re.fullmatch(r"hours_for_(\d+)_\w+", row["metric"].lower()):
        return lambda seconds: seconds * float(steps.group(1)) / 3600
    unit = _time_unit(words, STEPS | TIME | ({"per"} if words & TIME else set()))
    if unit is None or not words & STEPS or "to" in words:
        raise _refused(row, "training", "step time, tokens or samples a second, TFLOP/s, MFU and memory")
    return lambda seconds: seconds * unit


def _rate_of_step(words: frozenset[str], row: Row, job: TrainingJob, tokens: int) -> float | None:
    """Tokens or samples of a step, of one GPU where the row says so; None if the metric is no such rate."""
    each = _seconds_of_rate(words)
    if each is None:
        return None
    share = job.layout.gpus if words & GPUS else 1
    if words & TOKENS and words <= TOKENS | PER:
        # torchtitan logs tokens of one GPU
        return tokens * each / (job.layout.gpus if "as logged" in row["metric"].lower() else share)
    if words & SAMPLES and words <= SAMPLES | PER:
        return tokens * each / job.seq / share
    return None


def service_measure(row: Row, job: ServingJob) -> Measure:
    """Return how a row's value follows from the seconds of a generated token; "tokens" may count prompts too.

    Raises:
        ConfigError: its metric is not one that is predicted.
    """
    words = words_of(row)
    each = _seconds_of_rate(words) or 0.0
    rate = each * (1.0 / job.gpus if words & GPUS else job.replicas)  # of a GPU, or of all replicas
    if rate and words & TOKENS and words <= TOKENS | PER | {"output", "total", "generated"}:
        # vLLM counts prompts; ROCm's page gives generated tokens of it
        text = f"{row.source} {row['source_path_or_url']} {row.notes}".lower()
        of_vllm = not words & {"output", "generated"} and "vllm" in text and "rocm" not in text
        counted = (job.prompt + job.answer) / job.answer if of_vllm or "total" in words else 1.0
        return lambda seconds: counted * rate / seconds
    if rate and words & REQUESTS and words <= REQUESTS | PER:
        return lambda seconds: rate / job.answer / seconds
    requests = requests_in_flight(job)
    if not job.requests:
        known = "tokens and requests a second"
        more = ", and with the number of requests (micro_batch) times between tokens and of a request"
        raise _refused(row, "inference of an unstated number of requests", known + more)
    if each and words & TOKENS and "user" in words and words <= TOKENS | RATES.keys() | {"per", "user", "output"}:
        return lambda seconds: each / requests / seconds
    of_token = _time_unit(words, TIME | TOKEN_TIME)
    if of_token is not None and words & {"tpot", "itl", "token"}:
        return lambda seconds: seconds * requests * of_token
    unit = _time_unit(words, TIME | {"request", "end", "to", "e", "2"})
    if unit is None or not words & {"time", "latency"} or ("to" in words and "end" not in words):
        raise _refused(row, "inference", "tokens and requests a second, times between tokens and of a request")
    return lambda seconds: seconds * requests * job.answer * unit


def is_of_prompts(row: Row) -> bool:
    """Return whether the metric is of prompts alone: the time to the first token, or the rate of prefill."""
    return bool(words_of(row) & {"ttft", "prefill"})


def prompt_measure(row: Row, job: ServingJob) -> Measure:
    """Return how a row's value follows from the seconds of one prompt.

    Raises:
        ConfigError: its metric is not one that is predicted, or prompts wait for one another.
    """
    words = words_of(row) - {"prefill", "input", "prompt"}
    each = _seconds_of_rate(words)
    if each and "ttft" not in words and words & TOKENS and words <= TOKENS | PER:
        rate = each * (1.0 / job.gpus if words & GPUS else job.replicas)
        return lambda seconds: rate * job.prompt / seconds
    unit = _time_unit(words, TIME | {"ttft"})
    if unit is None or not words & {"ttft", "time", "latency"}:
        raise _refused(row, "prompts", "the time to the first token, and tokens a second of prefill")
    if job.requests > 1:
        raise ConfigError("the time to the first token of several requests depends on how they arrive")
    return lambda seconds: seconds * unit


def product_measure(row: Row, job: GemmJob) -> Measure:
    """Return how a row's value follows from the seconds of products.

    Raises:
        ConfigError: its metric is not one that is predicted.
    """
    words = words_of(row)
    if words & {"tflops", "tflop"} and words <= FLOPS | PASSES:
        passes = len(PASSES_MULTIPLIED.get(job.passes, (job.passes,)))
        flops = passes * sum(2.0 * m * n * k for m, n, k in job.shapes) * job.groups / 1e12
        return lambda seconds: flops / seconds
    each = _seconds_of_rate(words)
    if each and words & TOKENS and words <= TOKENS | PER | PASSES:
        return lambda seconds: each * job.shapes[0][0] * job.groups / seconds
    unit = _time_unit(words, TIME | PASSES | {"layer"})
    if unit is None:
        raise _refused(row, "matrix products", "times, TFLOP/s and tokens a second")
    return lambda seconds: seconds * unit
