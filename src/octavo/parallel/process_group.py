"""Joining the process group of a launch: torchrun's and Kubernetes' variables, or Slurm's.

| launcher                              | variables                                                                |
|---------------------------------------|--------------------------------------------------------------------------|
| torchrun, ``octavo train --nproc``    | RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT                   |
| Kubernetes' training operators        | the same, perhaps without LOCAL_RANK                                     |
| ``srun``                              | SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST,  |
|                                       | SLURM_JOB_ID                                                             |

The ranks meet at a store (torch.distributed.TCPStore). torchrun keeps one for as long as it runs, over restarts of the
ranks; elsewhere the first rank has it. A :class:`Launch` notes there what outlives a restart. So each attempt has keys
of its own, by a number that the ranks agree on there: TORCHELASTIC_RESTART_COUNT is each machine's own, which
does not count restarts for a failure elsewhere.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import default_pg_timeout

from octavo.errors import ConfigError, TrainingError
from octavo.parallel.ranks import Ranks, named_ranks

__all__ = ["Launch", "Place", "joined", "place_of"]

FIRST_HOSTS = re.compile(r"(?:[^,\[\]]|\[\d[^\[\]]*\])+")  # up to a comma outside of brackets
NUMBERS = re.compile(r"\[(\d+)[^\]]*\]")
LONGEST_WAIT = timedelta(days=7)  # of a rank for the first one, which may prepare a large text
FAILURES, FAILED, EXIT_CODE = "failures", "failed", "exit code"
OPEN, ALL, MOMENT_S = "open", "all", 0.25
FAILURE_SECONDS = 10  # of a rank whose collective broke for the exit code of the rank that failed
LOWEST_PORT, PORTS = 20_000, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's place in a launch.

    Attributes:
        rank: its number.
        size: number of ranks.
        local_rank: its number on its machine.
        host: where the store is.
        port: of the store.
        local_size: number of ranks on its machine that share the cores it may use.
        has_store: whether the launcher has the store.
    """

    rank: int
    size: int
    local_rank: int = 0
    host: str = "localhost"
    port: int = 29500
    local_size: int = 1
    has_store: bool = False


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return this process's place by its variables; None outside of a launch.

    Raises:
        ConfigError: a variable is missing or no number.

    Example:
        >>> slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "71", "SLURM_LOCALID": "3"}
        >>> place_of({**slurm, "SLURM_STEP_NODELIST": "gpu[04-05,9]"})
        Place(rank=3, size=8, local_rank=3, host='gpu04', port=20071, local_size=1, has_store=False)
    """
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return Place(
                rank=int(environment["RANK"]),
                size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", 0)),
                host=environment["MASTER_ADDR"],
                port=int(environment["MASTER_PORT"]),
                local_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
                has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # of srun; a batch script has SLURM_NTASKS alone
            return Place(
                rank=int(environment["SLURM_PROCID"]),
                size=int(environment["SLURM_STEP_NUM_TASKS"]),
                local_rank=int(environment["SLURM_LOCALID"]),
                host=environment.get("MASTER_ADDR") or _first_host(environment["SLURM_STEP_NODELIST"]),
                port=int(environment.get("MASTER_PORT") or LOWEST_PORT + int(environment["SLURM_JOB_ID"]) % PORTS),
            )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the launcher's variables cannot be read: {error}; start the ranks by octavo train --nproc, torchrun or "
            "srun, or unset RANK and WORLD_SIZE"
        ) from error
    return None


def _first_host(nodes: str) -> str:
    """First of Slurm's list of nodes, such as gpu[04-05,9]-ib,cpu1."""
    match = FIRST_HOSTS.match(nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}")
    return NUMBERS.sub(r"\1", match[0])


class Launch:
    """The ranks of one launch, and what they note at its store.

    Attributes:
        ranks: the ranks.
        attempt: times that all ranks came before, under this launcher.
        local_size: see :class:`Place`.
    """

    def __init__(self, ranks: Ranks, store: Store, attempt: int, *, local_size: int = 1) -> None:
        self.ranks, self.attempt, self.local_size = ranks, attempt, local_size
        self._lasting = PrefixStore("octavo", store)
        self._passing = PrefixStore(f"octavo/{attempt}", store)

    def note(self, key: str) -> None:
        """Note a key for all ranks and all later attempts."""
        self._lasting.set(key, "")

    def was_noted(self, key: str) -> bool:
        """Return whether a rank has noted the key, in this attempt or an earlier one."""
        return bool(self._lasting.check([key]))

    def count(self, key: str) -> int:
        """Return how many ranks have counted this key in this attempt, with this one; 1 if the store has ended."""
        try:
            return int(self._passing.add(key, 1))
        except distributed.DistError:
            return 1

    def note_failure(self) -> bool:
        """Note that this rank has failed; return whether it is the first one of this attempt."""
        return self.count(FAILURES) == 1

    def note_exit_code(self, code: int) -> None:
        """Note the exit code of a failure for the ranks whose collectives it breaks; nothing if the store has ended."""
        with suppress(distributed.DistError):
            self._passing.set(EXIT_CODE, str(code))

    def exit_code(self, otherwise: int) -> int:
        """Return the exit code that a rank has noted in this attempt; ``otherwise`` if none comes."""
        try:
            self._passing.wait([EXIT_CODE], timedelta(seconds=FAILURE_SECONDS))
            return int(self._passing.get(EXIT_CODE))
        except distributed.DistError:
            return otherwise

    def has_failed(self) -> bool:
        """Return whether a rank has failed in this attempt; False if the store has ended."""
        try:
            return bool(self._passing.check([FAILURES]))
        except distributed.DistError:
            return False

    @contextmanager
    def first_goes_ahead(self, key: str) -> Iterator[None]:
        """Run the block on the first rank, then on the others, however long the first one takes.

        Raises:
            DistError: it failed there.
        """
        if not self.ranks.is_first:
            self._passing.wait([key], LONGEST_WAIT)
            if self._passing.get(key) == FAILED.encode():
                raise distributed.DistError("the first rank has failed")
            yield
            return
        try:
            yield
        except BaseException:
            self.note_failure()  # before the others learn of it, and fail too
            self._passing.set(key, FAILED)
            raise
        self._passing.set(key, "done")


@contextmanager
def joined(place: Place, *, timeout: timedelta | None = None) -> Iterator[Launch]:
    """Join the other processes of a launch as the default process group: gloo on CPUs, NCCL on GPUs.

    Args:
        place: this process's place.
        timeout: of the collectives, the first of which waits for all ranks; torch's by default.

    Raises:
        TrainingError: the store cannot be reached, or ranks do not come.
    """
    is_master = place.rank == 0 and not place.has_store
    limits: Any = {} if timeout is None else {"timeout": timeout}
    address = f"{place.host}:{place.port}"
    try:
        store = TCPStore(place.host, place.port, is_master=is_master, wait_for_workers=False, **limits)
    except distributed.DistError as error:
        raise TrainingError(
            f"rank {place.rank} cannot {'listen' if is_master else 'reach the first rank'} at {address}: {error}; "
            "see that the first rank runs, and that its port is free and open to all machines"
        ) from None
    if place.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(place.local_rank)
    attempt = _agreed_attempt(place, PrefixStore("attempts", store), default_pg_timeout if timeout is None else timeout)
    group_store = PrefixStore(f"group/{attempt}", store)
    distributed.init_process_group(store=group_store, rank=place.rank, world_size=place.size, **limits)
    yield Launch(Ranks(rank=place.rank, size=place.size), store, attempt, local_size=place.local_size)
    distributed.destroy_process_group()  # after an error it might wait for other ranks


def _agreed_attempt(place: Place, store: Store, timeout: timedelta) -> int:
    """Wait for all ranks; return the number of this attempt, from 0, which no earlier one has.

    The first rank opens a new attempt, waits for the others, closes it, and then lets them go on. So an attempt that is
    left open, by ranks that were killed, is let go by none; a rank that has come to it waits for the next one, too.

    Raises:
        TrainingError: ranks do not come.
    """
    attempt, ends = "", time.monotonic() + timeout.total_seconds()
    if place.rank == 0:
        attempt = str(store.add("count", 1) - 1)
        store.set(OPEN, attempt)
    others = [f"{attempt}/{rank}" for rank in range(1, place.size)]
    while not _have_come(store, others if place.rank == 0 else [f"{attempt}/{ALL}"]):
        if place.rank and store.check([OPEN]) and (opened := store.get(OPEN).decode()):
            attempt = opened
            store.set(f"{attempt}/{place.rank}", "")
        if time.monotonic() > ends:
            missing = [rank for rank in range(1, place.size) if not store.check([f"{attempt}/{rank}"])]
            raise TrainingError(
                f"{named_ranks(missing if attempt else [0])} of {place.size} did not come to {place.host}:{place.port} "
                f"in {timeout.total_seconds():g} seconds: start as many as the launcher's variables say, on machines "
                "that reach it"
            )
    if place.rank == 0:
        store.set(OPEN, "")
        store.set(f"{attempt}/{ALL}", "")
    return int(attempt)


def _have_come(store: Store, keys: list[str]) -> bool:
    """Return whether all keys are there, perhaps after a moment."""
    if not keys or store.check(keys):  # waiting with a time-out, torch prints a warning for each
        return True
    time.sleep(MOMENT_S)
    return False
