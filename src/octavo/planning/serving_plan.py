"""A plan of inference: latency, throughput and memory of each precision over requests in flight and prompts' length."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError
from octavo.planning.constants import Constants, prompt_seconds, serving_seconds
from octavo.planning.hardware import Hardware
from octavo.planning.jobs import MOST, SERVERS, Framework, ServingJob
from octavo.planning.model_shapes import ModelShape
from octavo.planning.precision import BF16, Kernel, Precision, precision_of_recipe, unsupported_reason
from octavo.planning.serving_costs import kept_positions, kv_bytes, requests_in_flight, serving_parts, weight_bytes

__all__ = ["ServingPoint", "ServingRequest", "serving_answer", "serving_points"]

BATCHES = (1, 4, 16, 64, 256)
FEWEST_MEASURED = 32  # requests that a published measurement names
LATENCY_MS, MORE_THAN = 50.0, 8  # the article uses FP8 for less than so long a token with more requests than this
FP8_CACHE, FP8_WEIGHTS = "fp8, FP8 cache", "fp8 weights"
# Precisions in the answer's words; of equally fast ones the first is proposed. No measurement is of INT8.
WORDS = {"fp8": "FP8", "int8": "INT8", "bf16": "BF16", FP8_WEIGHTS: "16 bits with FP8 weights"}
WORDS |= {FP8_CACHE: "FP8 with an FP8 cache"}  # proposed where nothing else fits: what it does to answers is not FP8's
LONGER = (4, 16)  # times the prompt that was asked for, each with as many requests as memory holds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequest:
    """A service to plan.

    Attributes:
        model: its shape.
        hardware: of each GPU.
        gpus: of one replica.
        prompt: tokens of a prompt; ``answer``: of what is generated.
        load: tokens a second that all replicas together must generate; 0 leaves the number of GPUs out.
        framework: that serves.
    """

    model: ModelShape
    hardware: Hardware
    gpus: int
    prompt: int
    answer: int
    load: float = 0.0
    framework: Framework = Framework.VLLM

    def __post_init__(self) -> None:
        if not all(1 <= each <= MOST for each in (self.gpus, self.prompt, self.answer)) or not 0 <= self.load < 1e15:
            raise ConfigError(f"gpus, prompt and answer must be 1 to {MOST:,}, and load between 0 and 1e15")
        if self.framework not in SERVERS:
            raise ConfigError(f"{self.framework} trains and does not serve; plan with {' or '.join(SERVERS)}")
        model, heads = self.model, self.model.heads
        if not model.causal:
            raise ConfigError(f"{model.name} is an encoder and generates no tokens; plan inference of a decoder")
        if model.attention_count and heads % self.gpus and not model.is_latent_mixture:
            most = max(each for each in range(1, min(self.gpus, heads + 1)) if heads % each == 0)
            raise ConfigError(
                f"the {heads} heads of {model.name} do not divide among {self.gpus} GPUs; give a replica {most}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoint:
    """One precision with one number of requests in flight.

    Attributes:
        precision: its name.
        prompt: tokens of a prompt.
        requests: in flight.
        token_ms: time between two tokens of one request.
        first_token_ms: time of a prompt that is computed alone.
        tokens_per_s: of the replica; ``low`` and ``high``: its 80 % interval.
        weights_gb: of the replica; ``kv_gb``: keys and values of all requests, of the prompt and 0.6 of the answer,
            by which memory is filled, and states of Mamba and linear attention.
        gpus_needed: for the load; 0 if none was given.
    """

    precision: str
    prompt: int
    requests: int
    token_ms: float
    first_token_ms: float
    tokens_per_s: float
    low: float
    high: float
    weights_gb: float
    kv_gb: float
    gpus_needed: int

    def record(self) -> dict[str, Any]:
        """Its fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def serving_points(request: ServingRequest, constants: Constants) -> tuple[list[ServingPoint], dict[str, str]]:
    """Return all points, and why a precision has none, by its name.

    Raises:
        ConfigError: none fits.
    """
    found, refused = [], {}
    for precision in _tried(request.hardware):
        reason = unsupported_reason(precision, request.hardware)
        job = ServingJob(
            model=request.model,
            hardware=request.hardware,
            gpus=request.gpus,
            tp=request.gpus,
            prompt=request.prompt,
            answer=request.answer,
            precision=precision,
            framework=request.framework,
            divides_experts=request.gpus > 1 and request.model.is_latent_mixture,
        )
        try:
            if reason is not None:
                raise ConfigError(reason)
            most = requests_in_flight(job)
        except ConfigError as error:
            refused[precision.name] = str(error)
            continue
        jobs = [replace(job, requests=size) for size in sorted({size for size in BATCHES if size < most} | {most})]
        found += [_point(each, request.load, constants) for each in (*jobs, *_longer(job))]
    if not found:
        raise ConfigError(next(reason for reason in reversed(refused.values()) if "does not fit" in reason))
    return found, refused


def _tried(hardware: Hardware) -> Iterator[Precision]:
    """BF16, INT8 and FP8; FP8 of weights alone where there are no units for it."""
    fp8 = precision_of_recipe("tensorwise")
    yield BF16
    if not hardware.has_fp8:
        yield replace(BF16, name=FP8_WEIGHTS, weight_bits=8)
    yield replace(fp8, name="int8", integer=True, kernel=Kernel.TENSOR)
    yield replace(fp8, name="fp8")
    yield replace(fp8, name=FP8_CACHE, kv_bytes=1)


def serving_answer(points: list[ServingPoint]) -> tuple[str, ...]:
    """The answer in sentences: whose tokens come soonest at the fewest requests above eight, then the most tokens."""
    asked = min(point.prompt for point in points)
    of_prompt = [point for point in points if point.prompt == asked]
    formats = {name: [point for point in of_prompt if point.precision == name] for name in WORDS}
    formats = {name: found for name, found in formats.items() if found}
    cached = formats.pop(FP8_CACHE, []) if len(formats) > 1 else []
    shared = set.intersection(*({point.requests for point in found} for found in formats.values()))
    at = min((requests for requests in shared if requests > MORE_THAN), default=max(shared))
    now = {name: next(point for point in found if point.requests == at) for name, found in formats.items()}
    best = min(now, key=lambda name: round(now[name].token_ms, 2))
    verdict = f"Only {WORDS[best]} fits" if best == FP8_CACHE else f"Serve in {WORDS[best]}"
    sentences = [f"{verdict}: with {_requests(at)} a token takes {_listed(now, _token_ms)}; 80 % intervals."]
    alike = [WORDS[name] for name, point in now.items() if name != best and point.high >= now[best].low]
    if alike:
        does = "does" if len(alike) == 1 else "do"
        sentences.append(f"{' and '.join(alike)} {does} not differ reliably from {WORDS[best]}: intervals overlap.")
    if "bf16" not in now and best != FP8_CACHE:
        sentences.append("BF16 does not fit.")
    if at < FEWEST_MEASURED:
        sentences.append(
            f"No measurement names fewer than {FEWEST_MEASURED} requests: times of {_requests(at)} are extrapolated, "
            "and these intervals too narrow."
        )
    within = [WORDS[name] for name, point in now.items() if point.token_ms < LATENCY_MS]
    sentences.append(f"Less than the article's {LATENCY_MS:g} ms: {', '.join(within) or 'none'}.")
    return (*sentences, _throughput(formats, cached), *_for_the_load(formats, at))


def _throughput(formats: Mapping[str, list[ServingPoint]], cached: list[ServingPoint]) -> str:
    """Sentence on the most requests that memory holds."""
    fullest = {name: max(found, key=lambda point: point.requests) for name, found in formats.items()}
    words = f"As many requests as memory holds: {_listed(fullest, _rate)}"
    return words + (
        f", {_rate(max(cached, key=lambda point: point.requests))} in {WORDS[FP8_CACHE]}." if cached else "."
    )


def _for_the_load(formats: Mapping[str, list[ServingPoint]], at: int) -> Iterator[str]:
    """Sentence on the fewest GPUs whose tokens keep the latency, or on those at ``at`` requests where none do."""
    needed = {}
    for name, found in formats.items():
        within = [point for point in found if point.token_ms < LATENCY_MS]
        needed[name] = min(
            within or [point for point in found if point.requests == at], key=lambda point: point.gpus_needed
        )
    if any(point.gpus_needed for point in needed.values()):
        words = _listed(needed, lambda point: f"{point.gpus_needed:,} ({_requests(point.requests)} at {_ms(point)})")
        limit = f"below {LATENCY_MS:g} ms a token where a format can be"
        yield f"GPUs for the load, {limit}; requests of each replica: {words}."


def _listed(points: Mapping[str, ServingPoint], words: Callable[[ServingPoint], str]) -> str:
    return ", ".join(f"{words(point)} in {WORDS[name]}" for name, point in points.items())


def _ms(point: ServingPoint) -> str:
    return f"{point.token_ms:.1f} ms"


def _token_ms(point: ServingPoint) -> str:
    """Time of a token with the ends of its interval, which are those of the rate."""
    ends = (1e3 * point.requests / rate for rate in (point.high, point.low))
    return "{} ({:.1f} to {:.1f})".format(_ms(point), *ends)


def _requests(number: int) -> str:
    return f"{number:,} request{'s' * (number > 1)}"


def _rate(point: ServingPoint) -> str:
    rate, low, high = (
        f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in (point.tokens_per_s, point.low, point.high)
    )
    interval = f"{low} to {high}"
    return f"{rate} tokens/s ({interval}, {_requests(point.requests)})"


def _longer(job: ServingJob) -> Iterator[ServingJob]:
    """The service with longer prompts, as far as a request fits."""
    for times in LONGER:
        longer = replace(job, prompt=times * job.prompt)
        try:
            yield replace(longer, requests=requests_in_flight(longer))
        except ConfigError:
            return


def _point(job: ServingJob, load: float, constants: Constants) -> ServingPoint:
    seconds = {name: float(value) for name, value in serving_seconds(serving_parts(job), constants.values).items()}
    prompts = prompt_seconds(serving_parts(replace(job, requests=1)), constants.values) * job.answer
    rate = 1.0 / seconds["total"]
    factor = math.exp(constants.width("infer", job))
    return ServingPoint(
        precision=job.precision.name,
        prompt=job.prompt,
        requests=job.requests,
        token_ms=seconds["total"] * job.requests * 1e3,
        first_token_ms=prompts * 1e3,
        tokens_per_s=rate,
        low=rate / factor,
        high=rate * factor,
        weights_gb=weight_bytes(job) / 1e9,
        kv_gb=kv_bytes(job, kept_positions(job)) * job.requests / 1e9,
        gpus_needed=job.gpus * -int(-load // rate) if load else 0,
    )
