"""Where the parts of a benchmark run: a device, its clock, the time that is left, and what has been found so far.

A part asks the session for everything that differs between a GPU and a rehearsal, so that the rehearsal runs the same
code: clocks, memory, CUDA graphs, compilation. In a rehearsal a graph is a plain call, a compiled function is traced
but not compiled, and there is no memory to report.
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
    """A part's time is over; what it has found stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Something to time.

    Attributes:
        build: makes what the call needs and returns the call; what it raises is the reason why there is no figure.
        work: what a call does, in ``unit`` without its "/s".
        unit: of the speed.
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
        seconds: of one call, by name and round.
        failures: those that did not, or not to the end.
    """

    variants: Mapping[str, Variant]
    runs: Mapping[str, Callable[[], object]]
    seconds: dict[str, list[float]]
    failures: tuple[Failure, ...]


@dataclass(slots=True)
class Session:
    """A benchmark that runs.

    Attributes:
        device: where.
        sizes: the shapes.
        clocks: of work with its launches, and of kernels alone.
        compiler: torch.compile's backend; None compiles nothing.
        on_progress: told what is being done.
        speeds: what this card reaches, by name, for later parts: "copy" in GB/s, "bf16" and "fp8" in TFLOP/s.
        deadline: ``time.monotonic()`` at which the part has to end.
        prebuilds: None; or, in a session that only fills the compilers' caches, whether it is this one that builds the
            next variant. It times none.
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
        """Whether the part's time is over."""
        return time.monotonic() > self.deadline

    def check_time(self, what: str) -> None:
        """End the part where its time is over.

        Raises:
            OutOfTimeError: it is; names what was to come next.
        """
        if self.is_late():
            raise OutOfTimeError(f"its time was over before {what} and what follows")

    def compare(self, variants: Mapping[str, Variant], *, kernels: bool = False) -> Timings:
        """Build variants, as many as there is time for, and time them in turn; one that fails at any time drops out.

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
            gc.freeze()  # what was built is not looked through again after every round
            in_turn = {candidate.name: candidate for candidate in built}
            seconds = interleaved(
                in_turn, rounds=self.sizes.rounds, clock=lambda candidate: candidate.timed(clock), is_late=self.is_late
            )
        finally:
            gc.unfreeze()
        failures += [candidate.failure for candidate in built if candidate.failure is not None]
        runs = {candidate.name: candidate.run for candidate in built if candidate.run is not None}
        each = {name: [found / in_turn[name].calls for found in seconds[name]] for name in runs}
        return Timings({name: variants[name] for name in runs}, runs, each, tuple(failures))

    def _built(self, variants: Mapping[str, Variant]) -> "tuple[list[_BuiltVariant], list[Failure]]":
        """Those that ran once, and why the others did not; in a session that builds ahead, no candidate."""
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
            except Exception as error:  # noqa: BLE001 (whatever it is, it is reported, and the others go on)
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
    """A session on this machine's Hopper GPU.

    Raises:
        BackendError: there is none.
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
    """A session on the CPU, whose times mean nothing."""
    return Session(torch.device("cpu"), REHEARSAL, (wall_clock, wall_clock), "eager")


def share_out(index: int, count: int) -> Iterator[bool]:
    """For :attr:`Session.prebuilds`: of ``count`` sessions the one of this index, from 0, builds every so many."""
    return cycle([other == index for other in range(count)])


def failure_of(name: str, error: Exception) -> Failure:
    """An error in a line and in full; paths are cut to their last names, since a result belongs to no machine."""
    text = str(error).strip().split("\n", 1)[0]
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    trace = "".join(traceback.format_exception(error))
    return Failure(name=name, reason=FOLDERS.sub("", reason), trace=FOLDERS.sub("", trace))


class _BuiltVariant:
    """A variant that was built. Its first error ends it: what it had built is let go, and it does nothing any more.

    Variants of a table are there at the same time, so the memory of one that has failed is what the others may need.

    Args:
        name: the variant's.
        run: a call.

    Attributes:
        run: a call; None once it has failed.
        calls: in a round.
        failure: its error, or None.
    """

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.name, self.calls = name, 1
        self.run: Callable[[], object] | None = run
        self.failure: Failure | None = None

    def __call__(self) -> None:
        """The calls of a round, untimed."""
        self.timed(wall_clock)

    def timed(self, clock: Clock) -> float:
        """Seconds of the calls of a round; NaN where it has failed."""
        if self.run is None:
            return math.nan
        try:
            return clock(partial(_repeat, self.run, self.calls))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is reported, and the others go on)
            self.failure = failure_of(self.name, error)
        self.run = None
        gc.unfreeze()  # the error is gone here, and with it the frames that held tensors
        gc.collect()
        gc.freeze()
        return math.nan


def _build(name: str, entry: Variant) -> "_BuiltVariant | Failure":
    """Built and called once; a function of its own, so that nothing keeps what one that failed had made."""
    try:
        run = entry.build()
        run()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is reported, and the others go on)
        return failure_of(name, error)
    return _BuiltVariant(name, run)


def _repeat(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()
