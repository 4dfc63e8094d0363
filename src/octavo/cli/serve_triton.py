"""``octavo serve REPO --engine triton``: start Triton's server in its own environment, wait, and stop it."""

import signal
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import print_lines
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
GrpcPort = Annotated[int, typer.Option(min=0, max=65535, help="triton: port of KServe over gRPC; 0 takes a free one.")]
MetricsPort = Annotated[
    int, typer.Option(min=0, max=65535, help="triton: port of Prometheus metrics; 0 takes a free one.")
]
TritonEnvironment = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="triton: environment of octavo triton setup. [default: ~/.cache/octavo/triton]"
    ),
]
ReadySeconds = Annotated[float, typer.Option(min=1.0, help="triton: time limit for loading its models.")]


def default_environment() -> Path:
    """Default folder of Triton's environment."""
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
        repository: folder of ``octavo export --format triton``.
        ports: HTTP, gRPC and metrics ports; 0 takes a free one.
        host: address to listen on.
        insecure: let other machines connect.
        environment: folder of ``octavo triton setup``.
        ready_seconds: time limit for loading the models.

    Raises:
        ConfigError: an unusable environment, repository or port.
        TritonError: Triton did not become ready, or exited.
    """
    from octavo.server import Address
    from octavo.server.triton.environment import find_environment
    from octavo.server.triton.running import TritonServer

    free_ports = _free_ports(host, ports)  # report an unknown host first
    if not (Address(host=host).is_loopback or insecure):
        raise ConfigError(
            f"Triton has no API keys, so at {host} any machine could use it; give --insecure to allow that, or use "
            "--host 127.0.0.1"
        )
    triton_environment = find_environment(environment)
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with TemporaryDirectory(prefix="octavo-triton-") as folder, ExitStack() as stack:
            log = Path(folder) / "tritonserver.log"
            with open_display() as display:
                advance = display.phase("loading", None)
                started = TritonServer.started(
                    repository,
                    triton_environment,
                    ports=free_ports,
                    log=log,
                    ready_seconds=ready_seconds,
                    on_wait=lambda seconds: advance(0, f"{seconds:.0f} s"),
                )
                server = stack.enter_context(started)
            print_lines(
                f"Triton is ready after {server.ready_s:.1f} s at http://{host}:{free_ports.http}, gRPC "
                f"{free_ports.grpc}, metrics {free_ports.metrics}; log {log}; press Ctrl-C to stop",
                to_stderr=True,
            )
            server.wait()
    except KeyboardInterrupt:
        print_lines("Triton has stopped", to_stderr=True)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _free_ports(host: str, requested: tuple[int, int, int]) -> "Ports":
    """Return the requested ports, 0 replaced by free ones; raise ConfigError for a port in use."""
    from octavo.server import Address
    from octavo.server.triton.running import Ports

    with ExitStack() as stack:
        sockets = [stack.enter_context(Address(host=host, port=port).bind()) for port in requested]
        http, grpc, metrics = (listening_socket.getsockname()[1] for listening_socket in sockets)
    return Ports(host=host, http=http, grpc=grpc, metrics=metrics)
