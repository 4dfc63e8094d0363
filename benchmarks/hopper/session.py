"""Sessions of the benchmark: device, clocks, remaining time, and speeds measured so far.

A session implements everything that differs between a GPU and a rehearsal, so that the rehearsal runs the same code:
clocks, memory, CUDA graphs, compilation. In a rehearsal a graph is a plain call, a compiled function is traced but not
compiled, and there is no memory to report.
"""

import gc
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from benchmarks.hopper.sizes import HOPPER, REHEARSAL, Sizes
from octavo.bench.results import Failure
from octavo.bench.timing import Clock, EventClock, interleaved, wall_clock
from octavo.errors import BackendError

__all__ = ["OutOfTimeError", "Session", "Timings", "Variant", "hopper_session", "rehearsal_session", "share_out"]

LEAD = 2e-3  # seconds: longer than Python takes to launch a round's calls
MOST_CALLS = 16
MOST_COPIES = 64
BUILDING_SHARE = 0.85  # of the time a part has left; the rest is for the rounds
FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/")
NO_TIME = "no time was left for it"

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class OutOfTimeError(Exception):
    """The time of a part is over; its finished sections are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A timed call.

    Attributes:
        build: creates the operands and returns the call; its exception is reported as the reason of a missing figure.
        work: amount of work of a call, in ``unit`` without its "/s".
        unit: unit of the speed.
    """

    build: Callable[[], Callable[[], object]]
    work: float
    unit: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of variants that ran in turn.

    Attributes:
        variants: those that ran.
        runs: their calls.
        seconds: time of one call, by name and round.
        failures: variants that failed, and the reasons.
    """

    variants: Mapping[str, Variant]
    runs: Mapping[str, Callable[[], object]]
    seconds: dict[str, list[float]]
    failures: tuple[Failure, ...]


@dataclass(slots=True)
class Session:
    """A running benchmark.

    Attributes:
        device: device of all tensors.
        sizes: the shapes.
        clocks: clocks of work with its launches, and of kernels alone.
        compiler: torch.compile's backend; None compiles nothing.
        on_progress: called with a description of the current work.
        speeds: ceilings of this card, by name, for later parts: "copy" in GB/s, "bf16" and "fp8" in TFLOP/s.
        deadline: ``time.monotonic()`` at which the part must end.
        prebuilds: None; in a session that only fills the compilers' caches and times nothing, an iterator of whether
            this process builds the next variant.
    """

    device: torch.device
    sizes: Sizes
    clocks: tuple[Clock, Clock]
    compiler: str | None
    on_progress: Callable[[str], None] = field(default=lambda _: None)
    speeds: dict[str, float] = field(default_factory=dict)
    deadline: float = math.inf
    prebuilds: Iterator[bool] | None = None

    @property
    def on_gpu(self) -> bool:
        """False in a rehearsal."""
        return self.device.type == "cuda"

    def is_late(self) -> bool:
        """Return True if the part's time is over."""
        return time.monotonic() > self.deadline

    def check_time(self, what: str) -> None:
        """End the part if its time is over.

        Raises:
            OutOfTimeError: the time is over; names the next step.
        """
        if self.is_late():
            raise OutOfTimeError(f"its time was over before {what} and what follows")

    def compare(self, variants: Mapping[str, Variant], *, kernels: bool = False) -> Timings:
        """Build as many variants as time allows, and time them in turn; a variant that fails drops out.

        Args:
            variants: by name; the most important ones first.
            kernels: time the GPU's work alone, without the launches.
        """
        clock = self.clocks[kernels]
        built, failures = self._built(variants)
        try:
            for candidate in built:
                took = candidate.timed(clock)
                candidate.calls = self._calls(took) if candidate.failure is None else 1
            gc.collect()
            gc.freeze()  # the garbage collector need not scan the built variants after every round
            in_turn = {candidate.name: candidate for candidate in built}
            seconds = interleaved(
                in_turn, rounds=self.sizes.rounds, clock=lambda candidate: candidate.timed(clock), is_late=self.is_late
            )
        finally:
            gc.unfreeze()
        failures += [candidate.failure for candidate in built if candidate.failure is not None]
        runs = {candidate.name: candidate.run for candidate in built if candidate.run is not None}
        each = {name: [round_seconds / in_turn[name].calls for round_seconds in seconds[name]] for name in runs}
        return Timings({name: variants[name] for name in runs}, runs, each, tuple(failures))

    def _built(self, variants: Mapping[str, Variant]) -> "tuple[list[_BuiltVariant], list[Failure]]":
        """Variants that ran once, and the failures of the others; a session that prebuilds returns no variant."""
        built: list[_BuiltVariant] = []
        failures: list[Failure] = []
        now = time.monotonic()
        builds_until = now + BUILDING_SHARE * (self.deadline - now)
        for name, entry in variants.items():
            if self.prebuilds is not None and not next(self.prebuilds):
                continue
            if time.monotonic() > builds_until:
                failures.append(Failure(name=name, reason=NO_TIME))
                continue
            self.on_progress(name)
            candidate = _build(name, entry)
            if isinstance(candidate, Failure):
                failures.append(candidate)
                gc.collect()
            elif self.prebuilds is None:
                built.append(candidate)
        return built, failures

    def look_at_each(self, runs: Mapping[str, R], look: Callable[[R], T]) -> tuple[dict[str, T], tuple[Failure, ...]]:
        """Apply ``look`` to every timed variant; its results, and the variants at which it failed."""
        found: dict[str, T] = {}
        failures: list[Failure] = []
        for name, run in runs.items():
            try:
                found[name] = look(run)
            except Exception as error:  # noqa: BLE001 (it is reported, and the other variants continue)
                failures.append(failure_of(name, error))
        return found, tuple(failures)

    def _calls(self, seconds: float) -> int:
        return max(1, min(MOST_CALLS, math.ceil(self.sizes.aim / max(seconds, 1e-9))))

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(*shape, device=self.device).to(dtype)

    def rotation(self, make: Callable[[], T], nbytes: int) -> "Rotation[T]":
        """As many different inputs as it takes to find none of them in the L2 cache again."""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.on_gpu else 2 * nbytes
        copies = max(1, min(MOST_COPIES, math.ceil(2 * cache / nbytes)))
        return Rotation([make() for _ in range(copies)])

    def compiled(self, function: F) -> F:
        """By torch.compile, for one shape."""
        if self.compiler is None:
            return function
        found: Any = torch.compile(function, dynamic=False, backend=self.compiler)
        return cast("F", found)

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        """The same as a CUDA graph; as it is in a session that only fills the compilers' caches."""
        if not self.on_gpu or self.prebuilds is not None:
            return run
        side = _side_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a capture that fails leaves, too
            for _ in range(3):
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                run()
        torch.cuda.current_stream().wait_stream(side)
        return _Replay(graph, run)

    def allocated(self) -> int:
        """Bytes of all tensors on the GPU; 0 in a rehearsal."""
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else 0

    def peak_above(self, rest: int, run: Callable[[], object]) -> int:
        """The most bytes that a call takes beyond ``rest``; 0 in a rehearsal."""
        if not self.on_gpu:
            run()
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - rest

    def forget(self) -> None:
        """Give back the memory and the graphs of what has been timed."""
        torch.compiler.reset()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


@cache
def _side_stream() -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps memory for every stream that it has met."""
    return torch.cuda.Stream()


@dataclass(frozen=True, slots=True)
class _Replay:
    """A captured run, with all that it reads and writes: a graph itself holds nothing that was made before it."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


class Rotation(Generic[T]):
    """Hands out its items in turn."""

    def __init__(self, items: list[T]) -> None:
        self.items, self._next = items, 0

    def __call__(self) -> T:
        """The next one."""
        self._next = (self._next + 1) % len(self.items)
        return self.items[self._next]


def hopper_session() -> Session:
    """Create a session on this machine's Hopper GPU.

    Raises:
        BackendError: the machine has none.
    """
    if not torch.cuda.is_available():
        raise BackendError(
            "python -m benchmarks.hopper needs an H100 or H200, and torch sees no CUDA device; try --rehearse"
        )
    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        raise BackendError(
            f"python -m benchmarks.hopper needs an H100 or H200 (compute capability 9.0), and "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    return Session(device, HOPPER, (EventClock(), EventClock(LEAD)), "inductor")


def rehearsal_session() -> Session:
    """Create a session on the CPU, whose times mean nothing."""
    return Session(torch.device("cpu"), REHEARSAL, (wall_clock, wall_clock), "eager")


def share_out(index: int, count: int) -> Iterator[bool]:
    """Value of :attr:`Session.prebuilds` for session ``index`` of ``count``, which builds every count-th variant."""
    return cycle([other == index for other in range(count)])


def failure_of(name: str, error: Exception) -> Failure:
    """Convert an error to a line and a traceback; paths are cut to file names, so that results name no folders."""
    text = str(error).strip().split("\n", 1)[0]
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    trace = "".join(traceback.format_exception(error))
    return Failure(name=name, reason=FOLDERS.sub("", reason), trace=FOLDERS.sub("", trace))


class _BuiltVariant:
    """A built variant. After its first error its operands are freed, and calls do nothing.

    All variants of a table are in memory at the same time, so others may need the memory of a failed one.

    Args:
        name: name of the variant.
        run: the call.

    Attributes:
        run: the call; None after a failure.
        calls: number of calls in a round.
        failure: its error, or None.
    """

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.name, self.calls = name, 1
        self.run: Callable[[], object] | None = run
        self.failure: Failure | None = None

    def __call__(self) -> None:
        """Run the calls of a round."""
        self.timed(wall_clock)

    def timed(self, clock: Clock) -> float:
        """Seconds of the calls of a round; NaN after a failure."""
        if self.run is None:
            return math.nan
        try:
            return clock(partial(_repeat, self.run, self.calls))
        except Exception as error:  # noqa: BLE001 (it is reported, and the other variants continue)
            self.failure = failure_of(self.name, error)
        self.run = None
        gc.unfreeze()  # the error is gone here, and with it the frames that held tensors
        gc.collect()
        gc.freeze()
        return math.nan


def _build(name: str, entry: Variant) -> "_BuiltVariant | Failure":
    """Build a variant and call it once; a separate function, so that no local variable keeps tensors after an error."""
    try:
        run = entry.build()
        run()
    except Exception as error:  # noqa: BLE001 (it is reported, and the other variants continue)
        return failure_of(name, error)
    return _BuiltVariant(name, run)


def _repeat(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()
