"""Triton's server as a process of octavo's: started, waited for until it is ready, and ended with it."""

import ctypes
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.checksums import SUMS, check_sums
from octavo.errors import ConfigError, TritonError
from octavo.server.triton.environment import Environment

__all__ = ["MODELS", "Ports", "TritonServer"]

MODELS = "models"  # the folder of a repository that Triton is started on
SHOWN = 40  # lines of a log
STEP_S = 0.1
ENDING_S = 30  # that Triton waits for answers that were begun; then a little more, and it is killed
KILLING_S = 10
HANGING_S = 5  # of one question whether it is ready
DEATH_SIGNAL = 1  # prctl(2)'s PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where a server listens.

    Attributes:
        host: an address.
        http: KServe over HTTP.
        grpc: KServe over gRPC.
        metrics: for Prometheus.
    """

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(slots=True, kw_only=True)
class TritonServer:
    """A server that runs.

    Attributes:
        process: that it is.
        log: what it prints.
        ready_s: seconds until it was ready.
    """

    process: "subprocess.Popen[bytes]"
    log: Path
    ready_s: float = 0.0

    @classmethod
    @contextmanager
    def started(
        cls,
        repository: Path,
        environment: Environment,
        *,
        ports: Ports,
        log: Path,
        ready_seconds: float,
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> "Iterator[TritonServer]":
        """A server that is ready, until the block ends.

        Args:
            repository: that :func:`write_repository` wrote.
            environment: to run in.
            ports: where to listen.
            log: a file for what it prints.
            ready_seconds: after which it is taken for hanging.
            on_wait: told how many seconds it has taken so far.

        Raises:
            ConfigError: the folder is no repository.
            CheckpointError: a file of a model in it is not the one that was written.
            TritonError: it ended before it was ready, or was not ready in time; says the end of its log.
        """
        models = repository / MODELS
        if not models.is_dir():
            raise ConfigError(
                f"{str(repository)!r} is no repository for Triton, which has a folder {MODELS!r}; "
                "octavo export MODEL --format triton --out REPO"
            )
        for sums in sorted(models.rglob(SUMS)):
            check_sums(sums.parent)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*map(str, _command(models, environment, ports))],
                env=environment.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is octavo's, which tells it to end
                preexec_fn=_end_with(ctypes.CDLL(None)),  # noqa: PLW1509 – one system call, which takes no lock
            )
        made = cls(process=process, log=log)
        try:
            made.ready_s = made._wait(ports, ready_seconds, on_wait)
            yield made
        finally:
            made._end()

    def wait(self) -> None:
        """Until it ends by itself.

        Raises:
            TritonError: that is no good end.
        """
        if self.process.wait():
            raise TritonError(f"Triton ended with {self.process.returncode}; the end of its log:\n{self._said()}")

    def _wait(self, ports: Ports, ready_seconds: float, on_wait: Callable[[float], None]) -> float:
        begun = time.monotonic()
        while not _is_ready(ports):
            passed = time.monotonic() - begun
            on_wait(passed)
            if self.process.poll() is not None:
                raise TritonError(
                    f"Triton ended with {self.process.returncode} before it was ready; the end of its log:\n"
                    f"{self._said()}"
                )
            if passed > ready_seconds:
                raise TritonError(
                    f"Triton was not ready after {ready_seconds:g} s; give --ready-seconds; the end of its log:\n"
                    f"{self._said()}"
                )
            time.sleep(STEP_S)
        return time.monotonic() - begun

    def _end(self) -> None:
        """Let it answer what was begun; a signal to octavo meanwhile ends it at once."""
        self.process.terminate()
        try:
            self.process.wait(ENDING_S + KILLING_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)  # its models are processes of its group
                self.process.wait()

    def _said(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-SHOWN:])


def _command(models: Path, environment: Environment, ports: Ports) -> Sequence[object]:
    return [
        environment.triton / "bin" / "tritonserver",
        f"--model-repository={models.resolve()}",
        f"--backend-directory={environment.triton / 'backends'}",
        *(f"--{surface}-address={ports.host}" for surface in ("http", "grpc", "metrics")),
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        f"--exit-timeout-secs={ENDING_S}",
        "--disable-auto-complete-config",  # which would load each model once more, to ask what its config.pbtxt says
    ]


def _end_with(libc: ctypes.CDLL) -> Callable[[], None]:
    """Told to end when octavo dies, were it by SIGKILL: Linux's doing, as Triton's wheel is for Linux alone."""
    return lambda: libc.prctl(DEATH_SIGNAL, signal.SIGTERM)


def _is_ready(ports: Ports) -> bool:
    host = f"[{ports.host}]" if ":" in ports.host else ports.host
    try:
        with urllib.request.urlopen(f"http://{host}:{ports.http}/v2/health/ready", timeout=HANGING_S) as response:
            return bool(response.status == 200)
    except OSError:  # nobody listens yet, or the models are being loaded
        return False
