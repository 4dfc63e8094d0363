"""A command on several ranks: start them, join them, and print what ends them.

The first rank prints results and progress. A failure of any rank is printed by that rank, in one sentence with its
number; the same sentence of several ranks once. What follows from it on the other ranks, whose collectives break, is
not printed: a rank notes its failure at the launch's store before its connections close.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

from octavo.cli.console import Terminated, complain, print_lines, sentence_of
from octavo.errors import ConfigError, OctavoError
from octavo.parallel.heartbeat import lost_connection
from octavo.parallel.process_group import Launch, joined, place_of

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["as_rank", "start_ranks"]

BAD_INPUT, DEFECT, TERMINATED = 2, 1, 128 + signal.SIGTERM
SAVE_SECONDS = "600"  # for ranks to finish their step and save after a signal, before they are killed; torch: 30
NAMES_RANKS = ("rank ", "ranks ")
STACK = "\nException raised from "  # torch's stack of C++, below the text of an error
LAUNCHER_POLL_S = 1.0


@contextmanager
def as_rank(*, shows_traceback: bool) -> Iterator[Launch | None]:
    """Join the ranks of this launch in the block, and print its failure; None outside of a launch.

    Args:
        shows_traceback: print the traceback also of an error that octavo explains.

    Raises:
        typer.Exit: the block failed on a rank.
    """
    place = place_of(os.environ)
    if place is None:
        yield None
        return
    if place.has_store:
        threading.Thread(target=_stop_without, args=(os.getppid(),), name="launcher", daemon=True).start()
    with joined(place) as launch:
        try:
            yield launch
        except (OctavoError, OSError) as error:
            _end(launch, error, code=BAD_INPUT, shows_traceback=shows_traceback)
        except typer.Exit:
            raise
        except (KeyboardInterrupt, Terminated):
            if launch.has_failed():  # torchrun ends the ranks that are left
                raise typer.Exit(TERMINATED) from None
            raise
        except Exception as error:  # noqa: BLE001 (printed with its traceback, by one rank)
            _end(launch, error, code=DEFECT, shows_traceback=True)


def _end(launch: Launch, error: Exception, *, code: int, shows_traceback: bool) -> NoReturn:
    """Print a failure of this rank, unless it follows from another's or was printed already."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which saw another rank end; this one ends too
    is_first, lost, text = launch.note_failure(), lost_connection(error), _described(error)
    if lost is not None:
        logging.getLogger(__name__).info("rank %d: %s", launch.ranks.rank, lost)
        if not is_first:  # with the first one's code: the launcher may see this rank's end before that rank's
            raise typer.Exit(launch.exit_code(otherwise=TERMINATED)) from None
        _print_lost(launch.ranks.rank, lost)
    elif launch.count(f"failure {zlib.crc32(text.encode())}") == 1:
        get_error_handler().record_exception(error)  # for torchrun's summary
        if shows_traceback:
            print_lines(*traceback.format_exc().splitlines(), to_stderr=True)
        named = any(word in text for word in NAMES_RANKS)
        complain(text if named else f"rank {launch.ranks.rank}: {text}")
    launch.note_exit_code(code)  # which ends the ranks that wait for it
    raise typer.Exit(code) from None


def _print_lost(rank: int, error: BaseException) -> None:
    """Print the sentence about a rank that cannot be reached and, below it, torch's error."""
    complain(
        f"rank {rank} lost its connection to another rank, which was killed or cannot be reached; continue from the "
        "last checkpoint with --resume"
    )
    print_lines(*str(error).partition(STACK)[0].splitlines(), to_stderr=True)


def _stop_without(launcher: int) -> None:
    """Send this process SIGTERM, after which it saves and stops, when the process that has started it is gone."""
    while os.getppid() == launcher:
        time.sleep(LAUNCHER_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _silence_launcher() -> None:
    """Hide the launcher's own account of failures and signals, which the ranks explain; its loggers have own levels."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _end_launch(failures: "Mapping[int, ProcessFailure]", max_restarts: int) -> NoReturn:
    """Exit as the rank did that failed and was not ended for it by the launcher; name a rank that was killed."""
    by_rank = sorted(failures.items(), key=lambda each: each[1].exitcode in (TERMINATED, -signal.SIGTERM))
    rank, failure = by_rank[0]
    if failure.exitcode >= 0:
        raise typer.Exit(failure.exitcode) from None
    complain(
        f"rank {rank} was ended by {failure.signal_name()}, and no restart is left of {max_restarts} (--max-restarts); "
        "continue from the last checkpoint with --resume"
    )
    raise typer.Exit(128 - failure.exitcode) from None


def _described(error: Exception) -> str:
    if isinstance(error, OSError):
        return sentence_of(error)
    return str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def start_ranks(count: int, *, max_restarts: int) -> NoReturn:
    """Run this process's own command on ``count`` ranks of this machine, by torch's elastic launcher.

    Args:
        count: number of ranks.
        max_restarts: how often the ranks are started again, from the last checkpoint, after one of them ended.

    Raises:
        typer.Exit: always, with the exit code of the first rank that failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name, value, least in (("--nproc", count, 1), ("--max-restarts", max_restarts, 0)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
    _silence_launcher()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVE_SECONDS)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "octavo", *sys.argv[1:])
    except ChildFailedError as error:
        _end_launch(error.failures, max_restarts)
    except SignalException as error:
        raise typer.Exit(128 + signal.Signals(error.sigval)) from None
    raise typer.Exit
