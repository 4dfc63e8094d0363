"""What users read when ranks fail: each failure once, with its rank, and nothing of what follows from it."""

import errno
import os
import signal
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
import typer
from torch.distributed import DistBackendError, HashStore  # type: ignore[attr-defined]

from octavo.cli.console import Terminated
from octavo.cli.ranks import BAD_INPUT, DEFECT, _end, _end_launch, start_ranks
from octavo.errors import CheckpointError, ConfigError, NonFiniteLossError
from octavo.parallel.process_group import Launch
from octavo.parallel.ranks import Ranks

GLOO = RuntimeError("[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:21408: Connection reset by peer")
NCCL = DistBackendError(
    "NCCL error in: NCCLUtils.hpp:268\nncclRemoteError: A call failed\nException raised from x\nframe"
)
LOST = (
    "error: rank {} lost its connection to another rank, which was killed or cannot be reached; continue from the last "
    "checkpoint with --resume"
)
BROKEN = "at step 3 the loss is nan; the first non-finite tensor is the loss (1 of 1 elements) on rank 1"


@pytest.fixture(autouse=True)
def sigterm():
    """Restore what SIGTERM does, which a rank that ends ignores."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def follows(failure: Exception) -> bool:
    return failure in (GLOO, NCCL) or failure.__cause__ is GLOO


def fail(launch: Launch, failure: Exception, **options: Any) -> NoReturn:
    try:
        raise failure
    except Exception as error:  # noqa: BLE001 (as a command has it)
        _end(launch, error, **options)


def printed(capsys, *failures: tuple[int, Exception], traceback: bool = False) -> list[str]:
    """What the ranks print to stderr that fail one after the other; those that follow end with the first one's code."""
    store = HashStore()
    codes: list[int] = []
    for rank, failure in failures:
        launch = Launch(Ranks(rank=rank, size=4), store, 0)
        code = BAD_INPUT if isinstance(failure, ConfigError | CheckpointError | OSError) else DEFECT
        codes.append(codes[0] if follows(failure) and launch.has_failed() else code)
        with pytest.raises(typer.Exit) as ended:
            fail(launch, failure, code=code, shows_traceback=traceback)
        assert ended.value.exit_code == codes[-1]
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_what_follows_from_a_failure_is_not_printed(capsys):
    amaxes = caused(ConfigError("rank 0 could not reduce its amaxes"), GLOO)
    lines = printed(capsys, (1, CheckpointError("disk")), (0, GLOO), (2, amaxes), (3, NCCL))
    assert lines == ["error: rank 1: disk"]


def test_a_killed_rank_is_reported_by_one_other(capsys):
    """With torch's own text, but for its stack of C++."""
    amaxes = caused(ConfigError("amaxes"), GLOO)
    assert printed(capsys, (2, GLOO), (0, amaxes), (3, GLOO)) == [LOST.format(2), str(GLOO)]
    assert printed(capsys, (2, amaxes)) == [LOST.format(2), str(GLOO)]
    assert printed(capsys, (1, NCCL)) == [LOST.format(1), *str(NCCL).splitlines()[:2]]


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("file /data/igloo/x.bin is corrupt"),
        RuntimeError("DataLoader timed out after 30 seconds"),
        RuntimeError("Broken pipe"),
        RuntimeError("[enforce fail at /build/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4"),
        DistBackendError("NCCL error in: NCCLUtils.hpp:275, invalid usage\nDuplicate GPU detected : rank 1 and rank 0"),
        torch.OutOfMemoryError("NCCL"),
    ],
    ids=lambda failure: str(failure)[:20],
)
def test_an_error_that_resembles_a_lost_connection_is_a_rank_s_own(capsys, failure):
    """With its traceback and whole text, also of a rank that fails after another one."""
    lines = printed(capsys, (0, CheckpointError("disk")), (1, failure), traceback=True)
    assert lines.count("Traceback (most recent call last):") == 2
    assert str(failure) in "\n".join(lines)
    assert lines[-1] == f"error: rank 1: {type(failure).__name__}: {str(failure).splitlines()[0]}"


def test_failures_of_several_ranks(capsys):
    full = OSError(errno.ENOSPC, "No space left on device", "tokens.bin")
    first, second = printed(capsys, (3, ConfigError("no GPU")), (1, full))
    assert first == "error: rank 3: no GPU"
    assert second.startswith("error: rank 1: cannot use tokens.bin: no space left on device; free some space")


def test_a_failure_of_all_ranks_is_printed_once(capsys):
    assert printed(capsys, *((rank, NonFiniteLossError(BROKEN)) for rank in (2, 0, 1))) == [f"error: {BROKEN}"]


def test_a_defect_has_one_traceback(capsys):
    lines = printed(capsys, (1, TypeError("mine")), (0, TypeError("mine")), traceback=True)
    assert [line for line in lines if line.startswith("Traceback")] == ["Traceback (most recent call last):"]
    assert [line for line in lines if line.startswith("error")] == ["error: rank 1: TypeError: mine"]


def test_a_rank_that_ends_is_not_interrupted(capsys, monkeypatch):
    """The launcher ends the ranks that are left with SIGTERM, while one waits for the exit code of the first."""

    def terminated(*_: object) -> NoReturn:
        raise Terminated

    def exit_code(_: Launch, otherwise: int) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return otherwise

    monkeypatch.setattr(Launch, "exit_code", exit_code)
    signal.signal(signal.SIGTERM, terminated)
    store = HashStore()
    Launch(Ranks(rank=0, size=2), store, 0).note_failure()
    with pytest.raises(typer.Exit):
        fail(Launch(Ranks(rank=1, size=2), store, 0), GLOO, code=DEFECT, shows_traceback=False)
    assert capsys.readouterr() == ("", "")


class Failure:
    def __init__(self, code: int) -> None:
        self.exitcode = code

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


@pytest.mark.parametrize(
    ("codes", "code", "line"),
    [
        ({0: 143, 1: 2}, 2, ""),
        ({0: -signal.SIGTERM, 1: 1}, 1, ""),
        ({0: 143, 1: -signal.SIGKILL}, 137, "error: rank 1 was ended by SIGKILL, and no restart is left of 3 "),
    ],
)
def test_exit_code_is_that_of_the_rank_that_failed_first(capsys, codes, code, line):
    failures = {rank: Failure(each) for rank, each in codes.items()}
    with pytest.raises(typer.Exit) as ended:
        _end_launch(failures, 3)  # type: ignore[arg-type]
    assert ended.value.exit_code == code
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize(("count", "restarts", "name"), [(0, 0, "--nproc"), (2, -1, "--max-restarts")])
def test_numbers_of_ranks_and_restarts(count, restarts, name):
    with pytest.raises(ConfigError, match=f"^{name} must be at least"):
        start_ranks(count, max_restarts=restarts)


def test_ranks_have_minutes_to_save_after_a_signal(monkeypatch):
    launched = Mock()
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")  # so that what the launch sets is removed again
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launched)
    with pytest.raises(typer.Exit):
        start_ranks(2, max_restarts=0)
    assert launched.call_args.args[0].shutdown_timeout == 600
