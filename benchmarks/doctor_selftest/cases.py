"""Runs of the self-test: with a fault, with its remedy, and clean; all short, those of a seed from a common start.

| kind      | workload | injection | recipe                                     | purpose                            |
|-----------|----------|-----------|--------------------------------------------|------------------------------------|
| fault     | yes      | yes       | the fault's                                | does the doctor name the fault?    |
| cured     | yes      | yes       | the fault's, changed by the remedy         | does the loss recover?             |
| reference | yes      | no        | tensorwise                                 | loss without the fault             |
| clean     | its own  | no        | every recipe, at several learning rates    | does the doctor report nothing?    |
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from benchmarks.doctor_selftest.faults import (
    FAULTS,
    LEARNING_RATE,
    Injection,
    add_adapter,
    adding_batch_norm,
    restarting_rate,
    switching_precision,
)
from benchmarks.doctor_selftest.faults.workloads import alternating, growing, jumping
from benchmarks.doctor_selftest.other_tools import ToolAnswer, asking_others
from octavo import recipes
from octavo.doctor import Finding, diagnose
from octavo.doctor.findings import Remedy
from octavo.doctor.remedies import applied
from octavo.experiments.short_run import ShortRun, Start, short_run, start_of
from octavo.nn import Linear
from octavo.recipes import Recipe
from octavo.text.tokens import TokenData
from octavo.training.config import DataConfig, ModelConfig, RunConfig, TrainingConfig, config_from_dict
from octavo.training.loop import Trainer

__all__ = ["CLEAN", "Plan", "RunKind", "SelftestCase", "Setting", "begin", "plan_of", "run_case"]


class RunKind(StrEnum):
    """Purpose of a run."""

    FAULT = "fault"
    CURED = "cured"
    REFERENCE = "reference"
    CLEAN = "clean"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestCase:
    """One run, by names, so that another process can run it.

    Attributes:
        kind: purpose of the run.
        name: name of the fault, or a key of :data:`CLEAN`.
        seed: seed of first weights and batches.
    """

    kind: RunKind
    name: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a case's run.

    Attributes:
        training: keys of the training section.
        recipes: recipes of layers, by path; "{layer}" is the number of the block.
        around: contexts of the updates, outermost first.
        ranks: number of processes.
        from_first_weights: start from initial weights instead of the seed's common start.
    """

    training: Mapping[str, Any] = field(default_factory=dict)
    recipes: Mapping[str, str | Recipe] = field(default_factory=dict)
    around: tuple[Injection, ...] = ()
    ranks: int = 1
    from_first_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The model and the length of every run of a self-test.

    Attributes:
        hidden_size: width; the model is otherwise the demo's.
        start_steps: updates in BF16 before the runs of a seed.
        steps: updates of a run.
        rank_steps: updates of a run with several processes.
    """

    hidden_size: int = 128
    num_layers: int = 4
    vocab_size: int = 2048
    start_steps: int = 160
    steps: int = 35
    rank_steps: int = 15
    batch_size: int = 4
    context: int = 128
    threads: int = 1

    def config(self, *, seed: int, training: Mapping[str, Any]) -> RunConfig:
        """A run's configuration."""
        common = {"lr": LEARNING_RATE, "min_lr": 1e-4, "warmup": 40, "steps": 800, "statistics_interval": 5}
        own = {"batch_size": self.batch_size, "context": self.context, "threads": self.threads, "eval_tokens": 8192}
        model = ModelConfig(
            hidden_size=self.hidden_size, intermediate_size=3 * self.hidden_size, num_layers=self.num_layers
        )
        data = DataConfig(vocab_size=self.vocab_size)
        return RunConfig(model=model, data=data, training=TrainingConfig(**{**common, **own, "seed": seed, **training}))


def _clean_plans() -> Iterator[tuple[str, Plan]]:
    by_preset = ("tensorwise", "delayed", "delayed_te", "rowwise", "blockwise", "mxfp8", "rowwise_hp_grad_weight")
    for recipe in by_preset:
        for rate in (LEARNING_RATE / 3, LEARNING_RATE, 2 * LEARNING_RATE):
            yield f"{recipe}, learning rate {rate:g}", Plan(training={"recipe": recipe, "lr": rate})
    yield "FP16 around, dynamic loss scale", Plan(training={"precision": "fp16"})
    yield "switch from BF16 to FP8", Plan(around=(switching_precision(),))
    yield "adapter", Plan(around=(_adapter,))
    yield "one large batch, tensorwise", Plan(around=(jumping("mlp.gate_proj", binades=20, after=3),))
    yield "alternating batches, tensorwise", Plan(around=(alternating("self_attn.q_proj", binades=10),))
    yield (
        "slow growth, delayed",
        Plan(training={"recipe": "delayed"}, around=(growing("mlp.down_proj", binades_a_step=0.02),)),
    )
    yield "two ranks, delayed", Plan(training={"recipe": "delayed"}, ranks=2)
    yield "two ranks, tensorwise", Plan(ranks=2)
    for recipe in ("tensorwise", "delayed", "mxfp8"):
        yield f"{recipe}, from first weights", Plan(training={"recipe": recipe, "warmup": 10}, from_first_weights=True)
    twice = {"batch_size": 2, "grad_accumulation": 2, "cache_weights": True}
    yield "two micro-batches, cached weights", Plan(training=twice)
    yield "first block in BF16", Plan(training={"overrides": {"model.layers.0.*": "bf16"}})
    yield "batch norm, batches alike", Plan(around=(adding_batch_norm(wandering=0.0),))
    yield "learning rate restarted", Plan(around=(restarting_rate,))


@contextmanager
def _adapter(trainer: Trainer, layer: int) -> Iterator[None]:
    with add_adapter(trainer, layer, zero=False):
        yield


CLEAN: dict[str, Plan] = dict(_clean_plans())
_FAULTS = {fault.name: fault for fault in FAULTS}


def plan_of(case: SelftestCase) -> Plan:
    """The plan of a case."""
    if case.kind is RunKind.CLEAN:
        return CLEAN[case.name]
    fault = _FAULTS[case.name]
    if case.kind is RunKind.REFERENCE:
        return Plan(around=(fault.workload,), ranks=fault.ranks)
    around = (fault.workload, fault.inject)
    return Plan(training=fault.training, recipes=fault.recipes, around=around, ranks=fault.ranks)


def begin(setting: Setting, data: TokenData, seed: int) -> Start:
    """Train the common start of a seed's runs: some updates in BF16."""
    config = setting.config(seed=seed, training={"recipe": "bf16"})
    _, trainer = short_run(config, data, steps=setting.start_steps)
    return start_of(trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestRun:
    """Result of a case.

    Attributes:
        run: losses and statistics.
        findings: findings of the doctor, worst first.
        answers: reports of other tools on the run's last step, by tool.
    """

    run: ShortRun
    findings: tuple[Finding, ...]
    answers: Mapping[str, ToolAnswer]


def run_case(
    case: SelftestCase, setting: Setting, data: TokenData, start: Start, *, rank: int = 0, remedy: Remedy | None = None
) -> SelftestRun:
    """Run a case in this process, as one of its ranks.

    Args:
        case: the case.
        setting: model and length.
        data: the token files.
        start: common start of the case's seed.
        rank: rank of this process, which determines its batches.
        remedy: remedy of a cured case; the layers that it changes do not get the fault's recipe.
    """
    plan, layer = plan_of(case), case.seed % setting.num_layers
    config = setting.config(seed=case.seed + 1000 * rank, training=plan.training)
    if remedy is not None:
        config = config_from_dict(applied(config.to_dict(), [remedy]))
    remedied = [*config.training.overrides, *config.training.skip]
    answers: dict[str, ToolAnswer] = {}

    @contextmanager
    def around(trainer: Trainer) -> Iterator[None]:
        with ExitStack() as stack:
            for inject in plan.around:
                stack.enter_context(inject(trainer, layer))
            if plan.ranks == 1:
                stack.enter_context(asking_others(trainer, answers))
            yield

    def prepare(model: nn.Module) -> None:
        for pattern, recipe in plan.recipes.items():
            path = pattern.format(layer=layer)
            module = model.get_submodule(path)
            assert isinstance(module, Linear)
            if not any(fnmatchcase(path, one) for one in remedied):
                module.set_recipe(recipes.get(recipe), module.scale_updates, path=module.path)

    steps = setting.steps if plan.ranks == 1 else setting.rank_steps
    begun = None if plan.from_first_weights else start
    run, _ = short_run(config, data, steps=steps, start=begun, around=around, prepare=prepare)
    return SelftestRun(run=run, findings=tuple(diagnose(run.series)), answers=answers)
