"""Triton's server as a subprocess of octavo: start, wait until ready, end with octavo."""

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

MODELS = "models"  # folder of a repository that Triton is started on
SHOWN = 40  # lines of the log in an error
STEP_S = 0.1
ENDING_S = 30  # time that Triton gives running answers at exit
KILLING_S = 10  # time after that until Triton is killed
HANGING_S = 5  # timeout of one readiness check
DEATH_SIGNAL = 1  # prctl(2)'s PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Addresses that a server listens at.

    Attributes:
        host: address.
        http: port of KServe over HTTP.
        grpc: port of KServe over gRPC.
        metrics: port of Prometheus metrics.
    """

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(slots=True, kw_only=True)
class TritonServer:
    """Running server.

    Attributes:
        process: its process.
        log: file with its output.
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
        """Start a server, wait until it is ready, and stop it when the block ends.

        Args:
            repository: folder that :func:`write_repository` wrote.
            environment: environment to run in.
            ports: addresses to listen at.
            log: file for its output.
            ready_seconds: time limit until it is ready.
            on_wait: called with the seconds waited so far.

        Raises:
            ConfigError: the folder is not a repository.
            CheckpointError: a file of a model in it was changed.
            TritonError: it ended before it was ready, or was not ready in time; with the end of its log.
        """
        models = repository / MODELS
        if not models.is_dir():
            raise ConfigError(
                f"{str(repository)!r} is not a Triton model repository: it has no folder {MODELS!r}; write one with "
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
                start_new_session=True,  # only octavo handles Ctrl-C, and ends Triton
                preexec_fn=_end_with(ctypes.CDLL(None)),  # noqa: PLW1509 – one system call, which takes no lock
            )
        server = cls(process=process, log=log)
        try:
            server.ready_s = server._wait(ports, ready_seconds, on_wait)
            yield server
        finally:
            server._end()

    def wait(self) -> None:
        """Wait until the server ends by itself.

        Raises:
            TritonError: it ended with an error.
        """
        if self.process.wait():
            raise TritonError(f"Triton ended with {self.process.returncode}; the end of its log:\n{self._log_end()}")

    def _wait(self, ports: Ports, ready_seconds: float, on_wait: Callable[[float], None]) -> float:
        begun = time.monotonic()
        while not _is_ready(ports):
            passed = time.monotonic() - begun
            on_wait(passed)
            if self.process.poll() is not None:
                raise TritonError(
                    f"Triton ended with {self.process.returncode} before it was ready; the end of its log:\n"
                    f"{self._log_end()}"
                )
            if passed > ready_seconds:
                raise TritonError(
                    f"Triton was not ready after {ready_seconds:g} s; raise --ready-seconds; the end of its log:\n"
                    f"{self._log_end()}"
                )
            time.sleep(STEP_S)
        return time.monotonic() - begun

    def _end(self) -> None:
        """Stop the server after its running answers; a signal to octavo meanwhile stops it at once."""
        self.process.terminate()
        try:
            self.process.wait(ENDING_S + KILLING_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)  # includes its models' processes
                self.process.wait()

    def _log_end(self) -> str:
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
        "--disable-auto-complete-config",  # else it loads each model once more to complete its config.pbtxt
    ]


def _end_with(libc: ctypes.CDLL) -> Callable[[], None]:
    """Make the kernel end the process when octavo dies, even by SIGKILL; Linux only, as Triton's wheel."""
    return lambda: libc.prctl(DEATH_SIGNAL, signal.SIGTERM)


def _is_ready(ports: Ports) -> bool:
    host = f"[{ports.host}]" if ":" in ports.host else ports.host
    try:
        with urllib.request.urlopen(f"http://{host}:{ports.http}/v2/health/ready", timeout=HANGING_S) as response:
            return bool(response.status == 200)
    except OSError:  # not listening yet, or still loading the models
        return False
