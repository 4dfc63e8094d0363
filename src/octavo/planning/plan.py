"""A plan: BF16 and every FP8 recipe of one training, each in its best layout, with time, memory, money and energy."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from octavo import recipes
from octavo.errors import ConfigError
from octavo.planning.constants import Calibration, Constants, training_seconds
from octavo.planning.gemm_costs import kernel_part
from octavo.planning.hardware import Hardware
from octavo.planning.jobs import DIVIDED_AS, MOST, SERVERS, TRAINED_WITH, Framework, Layout, Recompute, TrainingJob
from octavo.planning.model_shapes import Linear, ModelShape, Part
from octavo.planning.precision import BF16, Precision, linear_precision, precision_of_recipe
from octavo.planning.search import Candidate, best_layout, layouts
from octavo.planning.training_costs import job_marks, linear_parts
from octavo.planning.training_memory import activation_bytes, recomputed_share

__all__ = ["LayerGain", "Option", "Plan", "PlanRequest", "layer_gains", "make_plan", "seconds_by_layer"]

# Recipes with another name for the same cost, or not for training, are left out.
TRIED = tuple(name for name in recipes.names() if name not in ("static", "weight_only", "article", "delayed_te"))
MOST_TOKENS = 10**15  # of a step
BEST_OF_BF16 = 24  # layouts that FP8 recipes try: FP8 changes what limits them, not which ones are good


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A training to plan.

    Attributes:
        model: its shape.
        hardware: of each GPU.
        gpus: how many.
        seq: tokens of a sequence.
        global_batch: sequences a step; 0 for about four million tokens, and one a GPU at least.
        tokens: of the whole training.
        price: of a GPU and an hour; 0 leaves costs out.
        framework: that trains.
    """

    model: ModelShape
    hardware: Hardware
    gpus: int
    seq: int = 8192
    global_batch: int = 0
    tokens: float = 1e12
    price: float = 0.0
    framework: Framework = Framework.TITAN

    def __post_init__(self) -> None:
        if not (1 <= self.gpus <= MOST and 1 <= self.seq <= MOST and 0 <= self.global_batch * self.seq <= MOST_TOKENS):
            raise ConfigError(f"gpus and seq must be 1 to {MOST:,}, and global-batch times seq 0 to {MOST_TOKENS:,}")
        if not 0 < self.tokens < 1e18 or not 0 <= self.price < 1e6:
            raise ConfigError("tokens must be above 0 and below 1e18, and price between 0 and 1e6")
        if self.framework in SERVERS:
            raise ConfigError(f"{self.framework} serves and does not train; plan with torchtitan, megatron or jax")

    @property
    def batch(self) -> int:
        """Sequences a step; where none was given, a power of two of them a GPU, which every micro-batch divides."""
        return self.global_batch or self.gpus << max(0, round(math.log2(4e6 / self.seq / self.gpus)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One precision of a plan; ``candidate`` is None with a reason.

    Attributes:
        name: of the recipe.
        candidate: its best layout.
        reason: why there is none.
        speedup: over BF16's best layout, with the ends of its 80 % interval.
        width: logarithm of the factor of the 80 % interval of a step's time.
        bf16_here: BF16 in this recipe's layout.
        at_bf16_layout: this recipe in BF16's best layout; None where it does not fit.
    """

    name: str
    candidate: Candidate | None
    reason: str | None = None
    speedup: tuple[float, float, float] | None = None
    width: float = 0.0
    bf16_here: Candidate | None = None
    at_bf16_layout: Candidate | None = None

    @property
    def gain_here(self) -> float | None:
        """Speed-up over BF16 in this recipe's layout; ``speedup`` is over BF16's own."""
        if self.candidate is None or self.bf16_here is None:
            return None
        return self.bf16_here.seconds["total"] / self.candidate.seconds["total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGain:
    """One kind of linear layer: time of a micro-batch in BF16 and in FP8, seconds."""

    name: str
    share: float
    bf16: float
    fp8: float

    @property
    def speedup(self) -> float:
        """BF16's time over FP8's; below 1 the layer should stay in BF16."""
        return self.bf16 / self.fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All options of a request, and the layers of the fastest FP8 recipe.

    Attributes:
        request: what was asked.
        options: BF16, then every FP8 recipe.
        layers: gains of the layers by the fastest FP8 recipe.
        by_layer: of BF16 and of the fastest FP8 recipe, as of :func:`seconds_by_layer`.
        own: the fastest of the recipes and layouts that the program's published trainings have, over BF16's fastest
            of these layouts; None where none of them runs.
        calibration: that GEMMs' speeds are of; None for the fit alone.
    """

    request: PlanRequest
    options: tuple[Option, ...]
    layers: tuple[LayerGain, ...]
    by_layer: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    own: Option | None = None
    calibration: Calibration | None = None

    @property
    def calibrated(self) -> tuple[str, ...]:
        """Recipes that run, of whose GEMMs the calibration has timings."""
        timed = frozenset() if self.calibration is None else self.calibration.kernels
        hardware, running = self.request.hardware, [each.name for each in self.options if each.candidate is not None]
        return tuple(name for name in running if kernel_part(precision_of_recipe(name).kernel, hardware) in timed)

    @property
    def calibrated_with(self) -> str:
        """Which speeds are measured, in words; "" without a calibration."""
        if self.calibration is None:
            return ""
        words = f"Calibrated with {self.calibration.file}: recipes {', '.join(self.calibrated) or 'none'}"
        has_others = len(self.calibrated) < sum(option.candidate is not None for option in self.options)
        return f"{words}; the others are the fit's" if has_others else words

    @property
    def bf16(self) -> Candidate:
        """BF16's best layout."""
        found = self.options[0].candidate
        assert found is not None
        return found

    @property
    def best(self) -> Option:
        """The fastest option, BF16 included."""
        found = _fastest(self.options)
        assert found is not None
        return found

    @property
    def best_fp8(self) -> Option | None:
        """The fastest FP8 recipe; None where the hardware runs none."""
        return _fastest(self.options[1:])

    @property
    def layouts_differ(self) -> str:
        """Effect of the two layouts on the fastest recipe's gain, in words; "" where BF16 has the same layout."""
        best = self.best_fp8
        if best is None or best.candidate is None or best.candidate.job.layout == self.bf16.job.layout:
            return ""
        words = f"BF16 is fastest with {self.bf16.job.layout}, {best.name} with {best.candidate.job.layout}"
        if best.gain_here is not None:
            words += f", where it is {best.gain_here:.2f} times as fast as BF16"
        if best.at_bf16_layout is None:
            return f"{words}; it does not fit in BF16's layout"
        gain = self.bf16.seconds["total"] / best.at_bf16_layout.seconds["total"]
        return f"{words}; in BF16's layout it is {gain:.2f} times as fast"

    @property
    def transferred(self) -> str:
        """Recipe and layouts of the gain that the program's published trainings do not have, in words; "" for none.

        The fastest that they have is named with it.
        """
        best, program = self.best_fp8, self.request.framework
        if best is None or best.candidate is None:
            return ""
        found = []
        if best.name not in TRAINED_WITH[program]:
            own = ", ".join(TRAINED_WITH[program])
            found.append(f"none is with {best.name}, only with {own}")
        of_fp8, of_bf16 = (each.job.layout for each in (best.candidate, self.bf16))
        others = dict.fromkeys(str(each.sharding) for each in (of_fp8, of_bf16) if not _has_layout(program, each))
        if others:
            own = ", ".join(DIVIDED_AS[program])
            found.append(f"none divides states as {' or '.join(others)}, only as {own}")
        if not found:
            return ""
        words = f"A transfer from other programs: of the published trainings by {program} {'; '.join(found)}"
        if self.own is None or self.own.candidate is None or self.own.speedup is None:
            return f"{words}; none of the layouts that were tried is {program}'s"
        gain, low, high = self.own.speedup
        words += f". The fastest that {program} has is {self.own.name} with {self.own.candidate.job.layout}"
        return f"{words}: {gain:.2f} times as fast as BF16 in the fastest such layout ({low:.2f} to {high:.2f}, 80 %)"

    def days(self, candidate: Candidate) -> float:
        """Days of the whole training."""
        return self.request.tokens / (candidate.tokens_per_s_per_gpu * self.request.gpus) / 86400

    def cost(self, candidate: Candidate) -> float:
        """Price of all GPUs and hours."""
        return self.days(candidate) * 24 * self.request.gpus * self.request.price

    def megawatt_hours(self, candidate: Candidate) -> float:
        """Energy at board power, without cooling and hosts; 0 where the power is not known."""
        return self.days(candidate) * 24 * self.request.gpus * self.request.hardware.watts / 1e6

    def record(self) -> dict[str, Any]:
        """Everything as JSON: the file that ``--compare`` reads."""
        request = self.request
        return {
            "model": request.model.name,
            "parameters": request.model.parameters,
            "hardware": request.hardware.name,
            "framework": str(request.framework),
            "gpus": request.gpus,
            "seq": request.seq,
            "global_batch": request.batch,
            "tokens": request.tokens,
            "price": request.price,
            "calibration": self.calibration and {"file": self.calibration.file, "recipes": list(self.calibrated)},
            "options": [self._option_record(option) for option in self.options],
            "layers": [
                {"name": each.name, "share_of_flops": each.share, "speedup": each.speedup} for each in self.layers
            ],
        }

    def _option_record(self, option: Option) -> dict[str, Any]:
        candidate = option.candidate
        if candidate is None:
            return {"recipe": option.name, "reason": option.reason}
        factor = math.exp(option.width)
        step = candidate.seconds["total"]
        return {
            "recipe": option.name,
            "layout": str(candidate.job.layout),
            "micro_batch": candidate.job.micro_batch,
            "recompute": str(candidate.recompute[0]),
            "recomputed_blocks": candidate.recompute[1],
            "step_time_s": step,
            "step_time_low_s": step / factor,
            "step_time_high_s": step * factor,
            "tokens_per_s_per_gpu": candidate.tokens_per_s_per_gpu,
            "mfu": candidate.mfu,
            "memory_gb": candidate.memory.total / 1e9,
            "memory_gb_by_part": {name: size / 1e9 for name, size in asdict(candidate.memory).items()},
            "activations_gb_by_layer": {
                str(policy): {name: size / 1e9 for name, size in activation_bytes(candidate.job, policy).items()}
                for policy in Recompute
            },
            "days": self.days(candidate),
            "cost": self.cost(candidate) if self.request.price else None,
            "megawatt_hours": self.megawatt_hours(candidate) or None,
            "speedup": option.speedup,
            "speedup_in_this_layout": option.gain_here,
            "seconds": candidate.seconds,
        }


def make_plan(request: PlanRequest, constants: Constants) -> Plan:
    """Return the plan of a training.

    Raises:
        ConfigError: not even BF16 fits.
    """
    layout = Layout(gpus=request.gpus)
    job = TrainingJob(
        model=request.model,
        hardware=request.hardware,
        layout=layout,
        seq=request.seq,
        global_batch=request.batch,
        micro_batch=1,
        precision=BF16,
        framework=request.framework,
    )
    every = list(layouts(request.model, request.hardware, request.gpus, seq=request.seq))
    in_bf16 = best_layout(job, constants, every)
    good = list(dict.fromkeys(candidate.job.layout for candidate in in_bf16))[:BEST_OF_BF16]
    options = [Option(name="bf16", candidate=in_bf16[0], width=constants.width("train", job))]
    searched = {
        name: _searched(job.at(_precision(name, request.framework)), constants, good)
        for name in TRIED
        if name != "bf16"
    }
    options += [_option(name, found, in_bf16, constants) for name, found in searched.items()]
    own = _own(request.framework, searched, in_bf16, constants)
    plan = Plan(request=request, options=tuple(options), layers=(), own=own, calibration=constants.calibration)
    best = plan.best_fp8
    gains = layer_gains(best.candidate.job, constants) if best is not None and best.candidate is not None else ()
    shown = [option for option in (plan.options[0], best) if option is not None and option.candidate is not None]
    by_layer = {option.name: seconds_by_layer(option.candidate.job, constants) for option in shown if option.candidate}
    return replace(plan, layers=gains, by_layer=by_layer)


def _precision(name: str, program: Framework) -> Precision:
    """Of a recipe; FSDP gathers codes where published trainings do: with tensorwise in torchtitan."""
    precision = precision_of_recipe(name)
    return replace(precision, gathers_codes=precision.gathers_codes and program == Framework.TITAN)


def _searched(job: TrainingJob, constants: Constants, good: list[Layout]) -> list[Candidate] | str:
    """The candidates of a recipe, the fastest first, or why there are none."""
    try:
        return best_layout(job, constants, good)
    except ConfigError as error:
        return str(error)


def _option(name: str, found: list[Candidate] | str, in_bf16: list[Candidate], constants: Constants) -> Option:
    """A recipe's fastest candidate beside BF16's; both lists have the fastest first."""
    if isinstance(found, str):
        return Option(name=name, candidate=None, reason=found)
    best, bf16 = found[0], in_bf16[0]
    gain, factor = bf16.seconds["total"] / best.seconds["total"], math.exp(constants.width("speedup", best.job))
    return Option(
        name=name,
        candidate=best,
        speedup=(gain, gain / factor, gain * factor),
        width=constants.width("train", best.job),
        bf16_here=next(each for each in in_bf16 if each.job.layout == best.job.layout),
        at_bf16_layout=next((each for each in found if each.job.layout == bf16.job.layout), None),
    )


def _fastest(options: Iterable[Option]) -> Option | None:
    usable = [option for option in options if option.candidate is not None]
    return min(usable, key=lambda each: each.candidate.seconds["total"] if each.candidate else math.inf, default=None)


def _has_layout(program: Framework, layout: Layout) -> bool:
    """Whether the program's published trainings divide states as the layout does."""
    return layout.sharding in DIVIDED_AS[program]


def _own(
    program: Framework,
    searched: Mapping[str, list[Candidate] | str],
    in_bf16: list[Candidate],
    constants: Constants,
) -> Option | None:
    """The fastest of the program's own recipes in its own layouts, over BF16 in these."""
    bf16 = [each for each in in_bf16 if _has_layout(program, each.job.layout)]
    options = []
    for name in TRAINED_WITH[program]:
        found = searched[name]
        own = [] if isinstance(found, str) else [each for each in found if _has_layout(program, each.job.layout)]
        options += [_option(name, own, bf16, constants)] if own else []
    return _fastest(options)


def layer_gains(job: TrainingJob, constants: Constants) -> tuple[LayerGain, ...]:
    """Return what FP8 does to each kind of linear layer, casts and launches included."""
    found = []
    total = sum(linear.multiplied for linear in job.model.linears())
    for linear in job.model.linears():
        if linear.part == Part.HEAD or linear_precision(job.precision, linear).is_bf16:
            continue
        seconds = [_layer_seconds(each, linear, constants) for each in (job.at(BF16), job)]
        found.append(LayerGain(name=linear.name, share=linear.multiplied / total, bf16=seconds[0], fp8=seconds[1]))
    return tuple(found)


def _layer_seconds(job: TrainingJob, linear: Linear, constants: Constants) -> float:
    """Seconds of one kind of linear layer: what the GPU computes, or what the host takes to launch it."""
    parts = linear_parts(job, linear) | {"micro_batches": 1.0, "bubble": 0.0, "scale": 0.0}
    return float(training_seconds(parts, constants.values)["total"])


def seconds_by_layer(job: TrainingJob, constants: Constants) -> dict[str, dict[str, float]]:
    """Return the seconds of a step's GEMMs and of its casts by kind of linear layer, the head's too.

    Each sums to what :func:`octavo.planning.constants.training_seconds` says of all layers together.
    """
    again = recomputed_share(job)[1]
    found: dict[str, dict[str, float]] = {"gemm": {}, "cast": {}}
    schedule = {"micro_batches": job.micro_batches, "bubble": 0.0, "scale": 0.0}
    for linear in job.model.linears():
        parts = linear_parts(job, linear, again=again) | job_marks(job) | schedule
        seconds = training_seconds(parts, constants.values)
        for kind, layers in found.items():
            layers[linear.name] = layers.get(linear.name, 0.0) + float(seconds[kind])
    return found
