"""``octavo serve REPO --engine triton``: Triton's server in its own environment, from beginning to end."""

import signal
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import stderr
from octavo.cli.progress import open_display
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.server.triton.running import Ports

__all__ = [
    "TRITON_OPTIONS",
    "GrpcPort",
    "MetricsPort",
    "ReadySeconds",
    "TritonEnvironment",
    "default_environment",
    "serve_repository",
]

TRITON_OPTIONS = {"grpc_port", "metrics_port", "triton_env", "ready_seconds"}
GrpcPort = Annotated[int, typer.Option(min=0, max=65535, help="triton: KServe over gRPC; 0 takes a free one.")]
MetricsPort = Annotated[int, typer.Option(min=0, max=65535, help="triton: for Prometheus; 0 takes a free one.")]
TritonEnvironment = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="triton: of octavo triton setup. [default: ~/.cache/octavo/triton]"),
]
ReadySeconds = Annotated[float, typer.Option(min=1.0, help="triton: for its models to load in.")]


def default_environment() -> Path:
    """Where Triton's environment is, if nothing else is said."""
    return Path.home() / ".cache" / "octavo" / "triton"


def serve_repository(
    repository: Path,
    *,
    ports: tuple[int, int, int],
    host: str,
    insecure: bool,
    environment: Path,
    ready_seconds: float,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        repository: of ``octavo export --format triton``.
        ports: for HTTP, gRPC and metrics.
        host: where to listen.
        insecure: let other machines ask.
        environment: of ``octavo triton setup``.
        ready_seconds: for the models to load in.

    Raises:
        ConfigError: an environment, a repository or a port that cannot be used.
        TritonError: Triton did not become ready, or ended by itself.
    """
    from octavo.server import Address
    from octavo.server.triton.environment import find_environment
    from octavo.server.triton.running import TritonServer

    places = _free(host, ports)  # a host that is not known is told first
    if not (Address(host=host).is_loopback or insecure):
        raise ConfigError(
            f"at {host} other machines can ask Triton, which knows no keys; give --insecure to let them, or listen at "
            "127.0.0.1"
        )
    found = find_environment(environment)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with TemporaryDirectory(prefix="octavo-triton-") as folder, ExitStack() as stack:
            log = Path(folder) / "tritonserver.log"
            with open_display() as display:
                advance = display.phase("loading", None)
                started = TritonServer.started(
                    repository,
                    found,
                    ports=places,
                    log=log,
                    ready_seconds=ready_seconds,
                    on_wait=lambda seconds: advance(0, f"{seconds:.0f} s"),
                )
                server = stack.enter_context(started)
            _say(
                f"Triton is ready after {server.ready_s:.1f} s at http://{host}:{places.http}, gRPC {places.grpc}, "
                f"metrics {places.metrics}; its log is {log}; Ctrl-C ends it"
            )
            server.wait()
    except KeyboardInterrupt:
        _say("Triton was told to end, and has")
    finally:
        signal.signal(signal.SIGTERM, before)


def _free(host: str, wanted: tuple[int, int, int]) -> "Ports":
    """Ports that nobody has; raises ConfigError where somebody does."""
    from octavo.server import Address
    from octavo.server.triton.running import Ports

    with ExitStack() as stack:
        taken = [stack.enter_context(Address(host=host, port=port).bind()) for port in wanted]
        http, grpc, metrics = (own.getsockname()[1] for own in taken)
    return Ports(host=host, http=http, grpc=grpc, metrics=metrics)


def _say(line: str) -> None:
    stderr().print(line, markup=False, soft_wrap=True)
