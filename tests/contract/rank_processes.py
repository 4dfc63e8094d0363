"""Programs of several ranks, each a process: what their checks returned, and what a layer keeps for backward there.

A program calls :func:`run_ranks`. Its ranks are forks of one process, which has imported torch and octavo once, and the
compiler, which optimizers ask for.
"""

import os
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which an optimizer imports otherwise, on every rank anew
from filelock import FileLock
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.policy.source_tree import ROOT

Checks = Mapping[str, Callable[[int, Path], Any]]  # each is given the rank and the folder


def results_of_ranks(program: str, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank of ``python -m PROGRAM FOLDER RANKS`` saved as :func:`results_file`, by check."""
    once(folder / f"{ranks} ranks", partial(_run_program, program, folder, ranks))
    return [torch.load(results_file(folder, rank, ranks), weights_only=False) for rank in range(ranks)]


def results_file(folder: Path, rank: int, ranks: int) -> Path:
    """Where a rank saves what its checks returned."""
    return folder / f"rank {rank} of {ranks}.pt"


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A temporary folder that is the same one for all workers of a session of pytest-xdist."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def once(place: Path, run: Callable[[], object]) -> None:
    """Call ``run`` unless another worker has; one that comes meanwhile waits, and fails if it did.

    Args:
        place: a file in a :func:`shared_folder` that says what has been run.
        run: what to call.
    """
    with FileLock(f"{place}.lock"):
        if not place.exists():
            try:
                run()
            except BaseException:
                place.write_text(traceback.format_exc())
                raise
            place.touch()
    failure = place.read_text()
    assert not failure, failure


def _run_program(program: str, folder: Path, ranks: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", program, str(folder), str(ranks)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told = process.communicate(timeout=1800)[1]  # 10 minutes of CPU, of two cores that others use too
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert not process.returncode, told


def run_ranks(
    checks: Callable[[int], Checks], *, around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> None:
    """Run the checks on ranks with gloo between them; the command line is FOLDER RANKS.

    Args:
        checks: returns those for a number of ranks.
        around: context of them all, in the process group.
    """
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            status = 1
            try:
                _run_rank(folder, rank, ranks, checks(ranks), around)
                status = 0
            except BaseException:  # noqa: BLE001 (printed; the fork must not go on as its parent)
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(f"the ranks ended with {statuses}" if any(statuses) else 0)


def _run_rank(
    folder: Path, rank: int, ranks: int, checks: Checks, around: Callable[[], AbstractContextManager[object]]
) -> None:
    """Save what each check returned, or its traceback."""
    _start_group(folder / f"store{ranks}", rank, ranks)
    found: dict[str, Any] = {}
    with around():
        for name, check in checks.items():
            try:
                found[name] = check(rank, folder)
            except Exception:  # noqa: BLE001 (the test of this check shows it)
                found[name] = traceback.format_exc()
    torch.save(found, results_file(folder, rank, ranks))
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _start_group(store: Path, rank: int, ranks: int, timeout: timedelta = timedelta(minutes=1)) -> None:
    place = f"file://{store}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks, timeout=timeout)


@contextmanager
def regrouped(folder: Path, name: str, rank: int, ranks: int, **options: timedelta) -> Iterator[bool]:
    """Replace the process group by one of the first ``ranks``, which ends with the block; checks after it have none.

    Yields whether this rank is one of them.
    """
    if distributed.is_initialized():
        distributed.barrier()  # a rank may still be joining it
        distributed.destroy_process_group()
    if rank < ranks:
        _start_group(folder / f"store {name}", rank, ranks, **options)
    yield rank < ranks
    if rank < ranks:
        distributed.destroy_process_group()


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a block that does not end; the main thread must run Python now and then."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def named(*checks: Callable[[int, Path], Any]) -> dict[str, Callable[[int, Path], Any]]:
    """Checks by their functions' names."""
    return {check.__name__: check for check in checks}


def of_check(results: list[dict[str, Any]], check: str) -> list[Any]:
    """What each rank returned for a check, none of which may have raised."""
    returned = [each[check] for each in results]
    for each in returned:
        assert not (isinstance(each, str) and each.startswith("Traceback")), each
    return returned


def kept_bytes(model: nn.Module, x: Tensor, besides: Callable[[], Iterable[Tensor]] = tuple) -> int:
    """Bytes of storage between the passes: of what autograd saves, and of ``besides``; a freed weight has none then."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    kept |= {tensor.untyped_storage()._cdata: tensor for tensor in besides()}
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    y.backward(torch.ones_like(y))
    return held


class Collectives(TorchDispatchMode):
    """Count of the collectives in a block, by their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count an operation."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))
