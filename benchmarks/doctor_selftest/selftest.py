"""Self-test of the doctor: runs with known faults, clean runs, and runs with its remedies.

Every run of a seed starts from the same weights and optimizer state, after some updates in BF16, and takes 35 updates
with a sample every 5. The fault is injected into the block numbered seed modulo number of blocks, so that reporting the
same layer every time does not pass.

The thresholds of ``octavo.doctor.Thresholds`` were tuned on ``tuning()``: width 96, seeds 100 and up. Published results
are measured on ``measuring()``: the demo's width of 128, seeds 0 to 4. No run is in both.

A run is judged by its first finding of severity "fail" or "warn", worst first, the one that a reader acts on:

- recall: share of runs with a fault whose first finding names its code, layer and role;
- precision: the number of those runs over that of all runs with a first finding, including clean ones;
- false alarms: share of clean runs with a first finding.

Later findings are counted if their code is neither that of the fault nor a consequence of it.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.doctor_selftest.cases import CLEAN, RunKind, SelftestCase, Setting, begin, plan_of, run_case
from benchmarks.doctor_selftest.faults import FAULTS, Fault, nothing
from benchmarks.doctor_selftest.other_tools import ToolAnswer
from benchmarks.doctor_selftest.two_ranks import run_on_ranks
from octavo.doctor import Finding, Severity
from octavo.doctor.findings import Remedy
from octavo.errors import ConfigError
from octavo.experiments.short_run import Start
from octavo.text.tokens import TokenData, open_data
from octavo.training.config import TrainingConfig

__all__ = ["Cure", "JudgedRun", "SelftestConfig", "SelftestResult", "measuring", "quick", "run_selftest", "tuning"]

Progress = Callable[[str, int, int], None]  # phase, done, total
BAR, GAP_BAR_NATS, FALSE_ALARM_BAR = 0.95, 0.02, 0.05
SETTINGS = {field.name for field in fields(TrainingConfig)}
Found = TypeVar("Found")
NAMES = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestConfig:
    """Settings of a self-test.

    Attributes:
        setting: model and length of a run.
        seeds: seeds; every fault is injected once for each.
        faults: names of faults.
        clean: names of clean runs, which take the seeds in turn.
        clean_seeds: number of seeds of each clean run.
        cures: number of seeds that also try remedies.

    Raises:
        ConfigError: an unknown name, or no seed.
    """

    setting: Setting = field(default_factory=Setting)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    faults: tuple[str, ...] = tuple(NAMES)
    clean: tuple[str, ...] = tuple(CLEAN)
    clean_seeds: int = 2
    cures: int = 1

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ConfigError("a self-test needs at least one seed")
        for given, known, what in ((self.faults, NAMES, "fault"), (self.clean, CLEAN, "clean run")):
            for name in given:
                if name not in known:
                    raise ConfigError(f"there is no {what} {name!r}; there are {', '.join(known)}")

    def cases(self) -> Iterator[SelftestCase]:
        """Yield the runs with faults, then the clean runs."""
        for seed in self.seeds:
            yield from (SelftestCase(kind=RunKind.FAULT, name=name, seed=seed) for name in self.faults)
        for index, name in enumerate(self.clean):
            for turn in range(min(self.clean_seeds, len(self.seeds))):
                yield SelftestCase(kind=RunKind.CLEAN, name=name, seed=self.seeds[(index + turn) % len(self.seeds)])

    def remediable(self) -> list[SelftestCase]:
        """Cases with faults whose remedies are tried."""
        names = [name for name in self.faults if NAMES[name].is_remediable]
        return [
            SelftestCase(kind=RunKind.FAULT, name=name, seed=seed)
            for seed in self.seeds[: self.cures]
            for name in names
        ]


def reference_of(case: SelftestCase) -> SelftestCase:
    """Run whose loss the cured run should have; faults without a workload share one."""
    fault = NAMES[case.name]
    alone = next(one.name for one in FAULTS if one.workload is nothing and one.ranks == fault.ranks)
    return SelftestCase(kind=RunKind.REFERENCE, name=alone if fault.workload is nothing else case.name, seed=case.seed)


def measuring() -> SelftestConfig:
    """Settings of the published result: the demo's width, seeds 0 to 4."""
    return SelftestConfig()


def tuning() -> SelftestConfig:
    """Settings on which thresholds may be tuned: another width, other seeds."""
    return SelftestConfig(setting=Setting(hidden_size=96), seeds=(100, 101, 102))


def quick() -> SelftestConfig:
    """Every fault once, a clean run of every recipe, no remedies."""
    recipes = tuple(name for name in CLEAN if name.endswith("learning rate 0.0015"))
    return SelftestConfig(seeds=(0,), clean=recipes, cures=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """Findings and loss of one run.

    Attributes:
        case: the case.
        findings: findings of the doctor, worst first.
        nats: validation loss at the end; None if the run broke.
        failure: error of a broken run.
        answers: reports of other tools.
        seconds: time of the run.
        remedy: remedy of a cured run.
    """

    case: SelftestCase
    findings: tuple[Finding, ...]
    nats: float | None
    failure: str | None
    answers: Mapping[str, ToolAnswer]
    seconds: float
    remedy: Remedy | None = None

    @property
    def fault(self) -> Fault | None:
        """The injected fault, or None."""
        return NAMES[self.case.name] if self.case.kind is RunKind.FAULT else None

    @property
    def said(self) -> list[Finding]:
        """Findings of severity "warn" or "fail", worst first."""
        return [one for one in self.findings if one.severity is not Severity.NOTE]

    @property
    def first(self) -> Finding | None:
        """Worst of these findings, or None."""
        return next(iter(self.said), None)

    @property
    def unexplained(self) -> list[Finding]:
        """Those of these findings that do not follow from the run's fault."""
        return [one for one in self.said if self.fault is None or not self.fault.explains(one)]

    def first_remedy(self) -> Remedy | None:
        """First remedy of the first finding that changes only settings of a run."""
        remedies = () if self.first is None else self.first.remedies
        return next((one for one in remedies if one.changes and one.changes.keys() <= SETTINGS), None)

    def names_fault(self, layers: int) -> bool:
        """Return True if the first finding names cause and place of the fault, in a model of ``layers`` blocks."""
        fault, first = self.fault, self.first
        return fault is not None and first is not None and fault.is_named_by(first, self.case.seed % layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """Validation losses of a fault's clean, faulty and cured run, in nats; None if a run broke."""

    fault: Fault
    remedy: Remedy
    clean: float | None
    faulty: float | None
    cured: float | None

    @property
    def gap(self) -> float | None:
        """Cured loss minus clean loss."""
        return None if self.clean is None or self.cured is None else self.cured - self.clean

    @property
    def restores(self) -> bool:
        """True if the cured loss is within the bar."""
        return self.gap is not None and self.gap <= GAP_BAR_NATS

    @property
    def had_hurt(self) -> bool:
        """True if the faulty loss is outside the bar; otherwise there is little to restore."""
        return self.faulty is None or (self.clean is not None and self.faulty - self.clean > GAP_BAR_NATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestResult:
    """All runs of a self-test, and its verdicts.

    Attributes:
        config: the settings.
        runs: one per case, in order.
        seconds: time of the self-test.
    """

    config: SelftestConfig
    runs: tuple[JudgedRun, ...]
    seconds: float

    def of(self, *kinds: RunKind) -> list[JudgedRun]:
        """Runs of these kinds."""
        return [run for run in self.runs if run.case.kind in kinds]

    @property
    def clean(self) -> list[JudgedRun]:
        """Runs without a fault: clean runs and references."""
        return self.of(RunKind.CLEAN, RunKind.REFERENCE)

    @property
    def named(self) -> list[JudgedRun]:
        """Runs whose fault the first finding names, with its place."""
        return [run for run in self.of(RunKind.FAULT) if run.names_fault(self.config.setting.num_layers)]

    @property
    def recall(self) -> float:
        """Share of the faulty runs that are named."""
        return len(self.named) / max(1, len(self.of(RunKind.FAULT)))

    @property
    def precision(self) -> float:
        """Share of the runs with a first finding in which that finding names the fault."""
        said = [run for run in (*self.of(RunKind.FAULT), *self.clean) if run.first is not None]
        return len(self.named) / max(1, len(said))

    @property
    def false_alarms(self) -> float:
        """Share of the clean runs with a first finding."""
        return sum(run.first is not None for run in self.clean) / max(1, len(self.clean))

    @property
    def clean_fails(self) -> list[JudgedRun]:
        """Clean runs with a finding of severity "fail"."""
        return [run for run in self.clean if run.first is not None and run.first.severity is Severity.FAIL]

    @property
    def cures(self) -> list[Cure]:
        """One per fault and seed whose remedy was tried."""
        nats = {run.case: run.nats for run in self.runs}
        return [
            Cure(
                fault=NAMES[case.name],
                remedy=remedy,
                clean=nats[reference_of(case)],
                faulty=nats[replace(case, kind=RunKind.FAULT)],
                cured=nats[case],
            )
            for case, remedy in ((run.case, run.remedy) for run in self.of(RunKind.CURED))
            if remedy is not None
        ]

    @property
    def passed(self) -> bool:
        """True if recall and precision reach 0.95, few clean runs have a finding, and none a failure."""
        is_quiet = self.false_alarms <= FALSE_ALARM_BAR and not self.clean_fails
        return self.recall >= BAR and self.precision >= BAR and is_quiet


def run_selftest(
    config: SelftestConfig | None = None,
    *,
    data: TokenData,
    processes: int = 1,
    on_progress: Progress | None = None,
) -> SelftestResult:
    """Run every case and judge it.

    Args:
        config: settings; None for :func:`measuring`.
        data: tokens of the built-in corpus, prepared with the setting's vocabulary size.
        processes: number of cases that run at a time, each on the setting's threads.
        on_progress: called with a phase ("start", "run" or "remedy"), the number of its finished runs and of all.

    Raises:
        ConfigError: ``processes`` is below 1, or the data has another vocabulary than the setting.
        TrainingError: a process of a run with several ranks failed.
    """
    chosen = config or measuring()
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, not {processes}")
    if data.vocab_size != chosen.setting.vocab_size:
        raise ConfigError(
            f"the self-test's model reads {chosen.setting.vocab_size} tokens and the data has {data.vocab_size}; "
            f"prepare it with vocab_size={chosen.setting.vocab_size}"
        )
    report, started = on_progress or _silent, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="octavo-") as name, _pool(processes) as pool:
        room = _Room(setting=chosen.setting, data=str(data.folder), starts=name)
        _all(_begin, [(room, seed) for seed in chosen.seeds], pool, lambda *done: report("start", *done))
        runs = _all(_run, [(room, case) for case in chosen.cases()], pool, lambda *done: report("run", *done))
        cures = list(_cures(room, chosen, runs))
        runs += _all(_run, cures, pool, lambda *done: report("remedy", *done)) if cures else []
    return SelftestResult(config=chosen, runs=tuple(runs), seconds=time.perf_counter() - started)


def _cures(room: "_Room", config: SelftestConfig, runs: Sequence[JudgedRun]) -> Iterator[tuple[Any, ...]]:
    """Yield runs with the fault and the doctor's remedy, and their references."""
    remediable, references = set(config.remediable()), dict[SelftestCase, None]()
    for run in runs:
        remedy = run.first_remedy() if run.case in remediable else None
        if remedy is not None:
            references[reference_of(run.case)] = None
            yield room, replace(run.case, kind=RunKind.CURED), remedy
    yield from ((room, case) for case in references)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """Settings, data and starts that a process needs to run a case."""

    setting: Setting
    data: str
    starts: str

    def start_file(self, seed: int) -> Path:
        return Path(self.starts) / f"{seed}.pt"


def _begin(room: _Room, seed: int) -> None:
    start = begin(room.setting, open_data(room.data), seed)
    torch.save({"step": start.step, "weights": start.weights, "optimizer": start.optimizer}, room.start_file(seed))


def _run(room: _Room, case: SelftestCase, remedy: Remedy | None = None) -> JudgedRun:
    start, started = Start(**torch.load(room.start_file(case.seed))), time.perf_counter()
    run = partial(run_case, remedy=remedy) if plan_of(case).ranks == 1 else run_on_ranks
    found = run(case, room.setting, open_data(room.data), start)
    return JudgedRun(
        case=case,
        findings=found.findings,
        nats=found.run.validation_nats,
        failure=found.run.failure,
        answers=found.answers,
        seconds=time.perf_counter() - started,
        remedy=remedy,
    )


def _pool(processes: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """Processes for every phase, since each takes seconds to start; None for this one alone."""
    return nullcontext() if processes == 1 else ProcessPoolExecutor(processes, mp_context=get_context("spawn"))


def _all(
    work: Callable[..., Found],
    tasks: Sequence[tuple[Any, ...]],
    pool: ProcessPoolExecutor | None,
    report: Callable[[int, int], None],
) -> list[Found]:
    """``work`` on every task, in the tasks' order."""
    report(0, len(tasks))
    if pool is None:
        found = []
        for number, task in enumerate(tasks, 1):
            found.append(work(*task))
            report(number, len(tasks))
        return found
    futures = [pool.submit(work, *task) for task in tasks]
    try:
        for number, future in enumerate(as_completed(futures), 1):
            future.result()
            report(number, len(tasks))
    except BaseException:  # such as SIGTERM's, which reaches this process alone: what has not begun does not begin
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return [future.result() for future in futures]


def _silent(phase: str, done: int, total: int) -> None:
    """Report nothing."""
