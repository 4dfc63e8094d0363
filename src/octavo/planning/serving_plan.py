"""A plan of inference: latency, throughput and memory of each precision over requests in flight and prompts' length."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError
from octavo.planning.constants import Constants, prompt_seconds, serving_seconds
from octavo.planning.hardware import Hardware
from octavo.planning.jobs import SERVERS, Framework, ServingJob
from octavo.planning.model_shapes import ModelShape
from octavo.planning.precision import BF16, Kernel, precision_of_recipe, unsupported_reason
from octavo.planning.serving_costs import kv_bytes, requests_in_flight, serving_parts, weight_bytes

__all__ = ["ServingPoint", "ServingRequest", "serving_answer", "serving_points"]

BATCHES = (1, 4, 16, 64, 256)
LATENCY_MS, MORE_THAN = 50.0, 8  # the article uses FP8 for less than so long a token with more requests than this
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
        if min(self.gpus, self.prompt, self.answer) < 1 or not 0 <= self.load < 1e15:
            raise ConfigError("gpus, prompt and answer must be 1 or more, and load between 0 and 1e15")
        if self.framework not in SERVERS:
            raise ConfigError(f"{self.framework} trains and does not serve; plan with {' or '.join(SERVERS)}")
        model, heads = self.model, self.model.heads
        if model.attention_count and heads % self.gpus and not model.is_latent_mixture:
            most = max(each for each in range(1, self.gpus) if heads % each == 0)
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
        weights_gb: of the replica; ``kv_gb``: keys and values of all requests at their longest.
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
    fp8 = precision_of_recipe("tensorwise")
    tried = (BF16, replace(fp8, name="int8", integer=True, kernel=Kernel.TENSOR), replace(fp8, name="fp8"))
    for precision in (*tried, replace(fp8, name="fp8, FP8 cache", kv_bytes=1)):
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


def serving_answer(points: list[ServingPoint]) -> str:
    """The answer in words: whether FP8's tokens come sooner at the fewest requests that are more than eight."""
    asked = min(point.prompt for point in points)
    by_name = {
        name: {each.requests: each for each in points if each.precision == name and each.prompt == asked}
        for name in ("bf16", "fp8")
    }
    bf16, fp8 = by_name["bf16"], by_name["fp8"]
    if not fp8:
        return "Do not serve in FP8: it is refused there."
    if not bf16:
        return "Serve in FP8: BF16 does not fit."
    several = sorted(requests for requests in fp8 if requests > MORE_THAN and requests in bf16)
    at = several[0] if several else max(set(fp8) & set(bf16), default=1)
    if at not in fp8 or at not in bf16:
        return "FP8 and BF16 hold no equal number of requests; compare their throughput."
    before, after = bf16[at].token_ms, fp8[at].token_ms
    verdict = "Serve in FP8" if after < before else "Serve in BF16"
    within = [name for name, each in (("BF16", before), ("FP8", after)) if each < LATENCY_MS]
    return (
        f"{verdict}: with {at} requests a token takes {after:.1f} ms in FP8 and {before:.1f} in BF16, weights "
        f"{fp8[at].weights_gb:.1f} and {bf16[at].weights_gb:.1f} GB; less than {LATENCY_MS:g} ms in "
        f"{' and '.join(within) or 'neither'}."
    )


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
    positions = job.prompt + job.answer
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
        kv_gb=kv_bytes(job, positions) * job.requests / 1e9,
        gpus_needed=job.gpus * -int(-load // rate) if load else 0,
    )
