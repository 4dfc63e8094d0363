"""Measurement of serving targets under the same loads, in alternating rounds, and their bars.

| load          | prompt     | answer    | clients       | shows                                    |
|---------------|------------|-----------|---------------|------------------------------------------|
| prefill, B    | ``prompt`` | one token | B, closed     | how fast prompts are read                |
| decode, B     | ``START``  | ``answer``| B, closed     | how fast answers are written             |
| open loop     | ``prompt`` | ``answer``| Poisson       | how long users wait at a rate of requests |

The open loop's rate is the same for all targets: by default ``SHARE`` of the first target's capacity in decode with
most clients. Percentiles are over the answers of all rounds, with numpy's linear interpolation.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from octavo.bench.results import Chart, Section, Verdict
from octavo.bench.serving.load import AnswerTimes, Ask, Prompt, closed_loop, open_loop, poisson_arrivals
from octavo.bench.timing import ratio
from octavo.errors import ConfigError
from octavo.inference import ServingRecipe
from octavo.nn.arguments import check_whole

__all__ = ["LoadMeasurement", "Target", "Workload", "load_name", "measured"]

BF16 = ServingRecipe.BF16
PREFILL, DECODE, OPEN = "prefill", "decode", "open loop"
BAR_CLIENTS = (1, 16)
START = 8  # tokens of a prompt whose answer is timed
SHARE = 0.5
PERCENTILES = (50, 95, 99)
PERCENTILE_NAMES = tuple(f"p{number}" for number in PERCENTILES)
LATENCIES: dict[str, Callable[[AnswerTimes], float | None]] = {
    "to the first token": lambda answer: answer.to_first,
    "from token to token": lambda answer: answer.a_token,
    "whole answer": lambda answer: answer.latency,
}
CLIENTS_BAR, MEMORY_BAR, PEER_BAR = 4.0, 0.55, 2.0
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts, answers and clients of a benchmark.

    Attributes:
        batches: numbers of concurrent clients.
        prompt: tokens per prompt; words, for a server.
        answer: tokens per answer.
        rounds: measured rounds of all loads.
        requests: requests per client and round.
        rate: requests per second in the open loop; None derives it from the first target.
        vocab_size: number of token ids to draw prompts from.
        seed: seed of prompts and arrivals.

    Raises:
        ConfigError: a number that is too small, or no batches or repeated ones.
    """

    batches: tuple[int, ...] = (1, 16)
    prompt: int = 128
    answer: int = 64
    rounds: int = 3
    requests: int = 2
    rate: float | None = None
    vocab_size: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for attribute in fields(self):
            if attribute.type is int and attribute.name not in {"vocab_size", "seed"}:
                check_whole(attribute.name, getattr(self, attribute.name), least=1)
        for batch in self.batches:
            check_whole("a batch", batch, least=1)
        if not self.batches or len({*self.batches}) < len(self.batches):
            raise ConfigError(f"batches must be different numbers of clients, at least one, not {list(self.batches)}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"rate must be a number of requests a second above 0, not {self.rate}")

    @property
    def closed_loads(self) -> dict[str, tuple[str, int]]:
        """Kind and number of clients of each closed loop, by name."""
        return {load_name(kind, batch): (kind, batch) for kind in (PREFILL, DECODE) for batch in sorted(self.batches)}

    def runs(self, targets: int) -> int:
        """Number of runs in all, including warm-up."""
        return (len(self.closed_loads) + 1) * targets * (self.rounds + 1)

    def prompts(self, count: int, length: int, answer: int, *, round_of: str) -> list[Prompt]:
        """Draw prompts that differ in every round, so that no cached keys and values are reused."""
        draw = random.Random(f"{self.seed}, {round_of}")
        return [
            Prompt(
                ids=tuple(draw.randrange(self.vocab_size) for _ in range(length if self.vocab_size else 0)),
                text=" ".join(draw.choice(WORDS) for _ in range(length)),
                answer_tokens=answer,
            )
            for _ in range(count)
        ]


def load_name(kind: str, batch: int) -> str:
    """Title of a closed loop's table.

    Example:
        >>> load_name("decode", 16)
        'decode, 16 at once'
    """
    return f"{kind}, {batch} at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine or a server to measure.

    Attributes:
        ask: sends a prompt and yields tokens.
        weight_bytes: bytes of the weights in memory; 0 if unknown.
    """

    ask: Ask
    weight_bytes: int = 0


@dataclass(slots=True)
class LoadMeasurement:
    """One load on one target, in all rounds.

    Attributes:
        answers: answers of all rounds.
        seconds: duration of each round, from the first request to the last token.
        tokens: counted tokens of each round: of prompts for a prefill, otherwise of answers.
    """

    answers: list[AnswerTimes] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, answers: Sequence[AnswerTimes], tokens: int) -> None:
        """Add a round."""
        self.answers += answers
        self.seconds.append(max(a.last for a in answers) - min(a.due for a in answers))
        self.tokens.append(tokens)

    @property
    def speed(self) -> float:
        """Tokens per second, median over rounds."""
        return statistics.median(count / spent for count, spent in zip(self.tokens, self.seconds, strict=True))

    @property
    def seconds_a_token(self) -> list[float]:
        """Seconds per token of each round."""
        return [spent / count for count, spent in zip(self.tokens, self.seconds, strict=True)]

    def percentiles_ms(self, of: Callable[[AnswerTimes], float | None]) -> list[float]:
        """p50, p95 and p99 of a latency of answers in milliseconds; empty if no answer has it."""
        latencies = [1e3 * value for answer in self.answers if (value := of(answer)) is not None]
        return [float(value) for value in np.percentile(latencies, PERCENTILES)] if latencies else []


Runs = Mapping[str, LoadMeasurement]  # by target


async def measured(
    targets: Mapping[str, Target],
    work: Workload,
    *,
    advance: Callable[[int, str], None] = lambda _done, _doing: None,
) -> list[Section]:
    """Run all loads on all targets; return a section per load, then one for memory.

    Args:
        targets: targets by name; ratios are to the first.
        work: prompts, answers and clients.
        advance: called before each run with (runs done, what runs); there are ``work.runs(len(targets))``.
    """
    loads = [*work.closed_loads, OPEN]
    runs_by_load = {load: {name: LoadMeasurement() for name in targets} for load in loads}
    done, rate = 0, work.rate
    for turn in range(work.rounds + 1):  # the first warms up
        for load in loads:
            for name, target in targets.items():
                advance(done, f"{load}: {name}")
                done += 1
                answers, tokens = await _asked(target.ask, work, load, turn, rate)
                if turn:
                    runs_by_load[load][name].add(answers, tokens)
                elif rate is None and load == loads[-2]:  # the first target's decode with most clients
                    rate = SHARE * len(answers) / (max(a.last for a in answers) - min(a.due for a in answers))
    assert rate is not None
    return [*(_section(load, runs_by_load[load], rate) for load in loads), _summary(runs_by_load, work, targets)]


async def _asked(ask: Ask, work: Workload, load: str, turn: int, rate: float | None) -> tuple[list[AnswerTimes], int]:
    """Run one round of a load; return its answers and the number of counted tokens."""
    round_of = f"{turn}, {load}"
    if load == OPEN:
        assert rate is not None
        prompts = work.prompts(max(work.batches) * work.requests, work.prompt, work.answer, round_of=round_of)
        due = poisson_arrivals(len(prompts), rate, seed=work.seed + turn)
        answers = await open_loop(ask, prompts, due)
        return answers, sum(answer.tokens for answer in answers)
    kind, clients = work.closed_loads[load]
    length, answer = (work.prompt, 1) if kind == PREFILL else (START, work.answer)
    prompts = work.prompts(clients * work.requests, length, answer, round_of=round_of)
    answers = await closed_loop(ask, prompts, clients=clients)
    return answers, length * len(prompts) if kind == PREFILL else sum(answer.tokens for answer in answers)


def _section(load: str, runs: Runs, rate: float) -> Section:
    """A row for each target."""
    base = next(iter(runs))
    columns = ["asked", "tokens/s", f"speed × {base} (quartiles)", *LATENCIES]
    seconds = {name: run.seconds_a_token for name, run in runs.items()}
    rows = [
        (
            name,
            f"{run.speed:,.1f}",
            "–" if len(run.seconds) < 2 else str(ratio(seconds, base, name)),
            *(_cell(run.percentiles_ms(of)) for of in LATENCIES.values()),
        )
        for name, run in runs.items()
    ]
    waits = {
        name: dict(zip(PERCENTILE_NAMES, run.percentiles_ms(lambda answer: answer.latency), strict=True))
        for name, run in runs.items()
    }
    due = f" Requests came at {rate:.3g} a second, as a Poisson process." if load == OPEN else ""
    return Section(
        title=load,
        columns=tuple(columns),
        rows=tuple(rows),
        notes=(f"Milliseconds, p50 / p95 / p99 of {len(next(iter(runs.values())).answers)} answers.{due}",),
        chart=Chart(unit="ms to the end of an answer", series=waits),
        raw={"runs": {name: asdict(run) for name, run in runs.items()}, "rate": rate if load == OPEN else None},
    )


def _cell(percentiles: Sequence[float]) -> str:
    return " / ".join(f"{value:,.1f}" for value in percentiles) or "–"


def _summary(runs_by_load: Mapping[str, Runs], work: Workload, targets: Mapping[str, Target]) -> Section:
    """Section with the memory of weights, and all bars."""
    weight_bytes = {name: target.weight_bytes for name, target in targets.items() if target.weight_bytes}
    bf16 = weight_bytes.get(BF16)
    rows = tuple(
        (name, f"{size / 1e6:,.1f} MB", f"{size / bf16:.3f}" if bf16 else "–") for name, size in weight_bytes.items()
    )
    return Section(
        title="memory of weights, and the bars",
        columns=("weights", "bytes", f"of {BF16}"),
        rows=rows,
        verdicts=(
            *_client_bars(runs_by_load, work),
            *_memory_bars(weight_bytes),
            *_peer_bars(runs_by_load, work, targets),
        ),
        raw={"weight_bytes": weight_bytes},
    )


def _client_bars(runs_by_load: Mapping[str, Runs], work: Workload) -> list[Verdict]:
    few, many = min(work.batches), max(work.batches)
    if (few, many) != BAR_CLIENTS:
        return []
    runs_of_few, runs_of_many = runs_by_load[load_name(DECODE, few)], runs_by_load[load_name(DECODE, many)]
    claim = f"{many} clients' throughput over {few}'s, decode"
    return [
        Verdict(claim=f"{claim}, {name}", found=runs_of_many[name].speed / runs_of_few[name].speed, bar=CLIENTS_BAR)
        for name in runs_of_few
    ]


def _memory_bars(weight_bytes: Mapping[str, int]) -> list[Verdict]:
    if BF16 not in weight_bytes:
        return []
    return [
        Verdict(claim=f"weights of {name} over {BF16}'s", found=size / weight_bytes[BF16], bar=MEMORY_BAR, at_most=True)
        for name, size in weight_bytes.items()
        if name != BF16
    ]


def _peer_bars(runs_by_load: Mapping[str, Runs], work: Workload, targets: Mapping[str, Target]) -> list[Verdict]:
    """Throughput of the first server over that of each other server, with most clients."""
    if any(target.weight_bytes for target in targets.values()):
        return []
    runs = runs_by_load[load_name(DECODE, max(work.batches))]
    first, *others = runs
    speed = runs[first].speed
    return [
        Verdict(claim=f"throughput of {first} over {name}, decode", found=speed / runs[name].speed, bar=PEER_BAR)
        for name in others
    ]
