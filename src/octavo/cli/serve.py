"""``octavo serve``: a model behind HTTP, for clients of OpenAI's API and of KServe's, and a page to chat with it.

With ``--engine triton`` it is Triton's server that runs, on a repository of ``octavo export --format triton``.
"""

import gc
import math
from contextlib import closing
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from octavo.cli.console import stderr
from octavo.cli.options import Hub, Model, read_api_key
from octavo.cli.progress import open_display
from octavo.cli.serve_triton import (
    TRITON_OPTIONS,
    GrpcPort,
    MetricsPort,
    ReadySeconds,
    TritonEnvironment,
    default_environment,
    serve_repository,
)
from octavo.errors import ConfigError
from octavo.formats import BF16, E4M3, FP32
from octavo.inference import EngineConfig, ServingRecipe, load_served_model
from octavo.nn.arguments import check_choice

if TYPE_CHECKING:
    from octavo.server import Service

__all__ = ["check_server_packages", "serve"]

RECIPES = ", ".join(ServingRecipe)
CACHE_FORMATS = {"e4m3": E4M3, "bf16": BF16, "fp32": FP32}
INSTALL = "pip install 'octavo[serve]'"
OCTAVO, TRITON = "octavo", "triton"
BOTH_ENGINES = {"model", "engine", "host", "port", "insecure"}  # options of


def _check_seconds(option: typer.CallbackParam, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{option.opts[0]} takes a positive number of seconds, not {value:g}")
    return value


def _seconds(about: str) -> Any:  # as typer.Option itself
    """An option for a time that has to end."""
    return typer.Option(help=about, callback=_check_seconds)


def serve(
    *,
    context: typer.Context,
    model: Model,
    engine: Annotated[str, typer.Option(help="octavo, or triton: MODEL is a repository for it then.")] = OCTAVO,
    recipe: Annotated[str, typer.Option(help=f"What weights and activations become: {RECIPES}.")] = ServingRecipe.FP8,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of octavo calibrate; for fp8-static.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients ask for. [default: the file's or folder's]")] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Its text is the key to send.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines ask without a key.")] = False,
    max_running: Annotated[int, typer.Option(help="Answers written at once.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Answers in the queue; more are refused.")] = 64,
    step_rows: Annotated[
        int | None,
        typer.Option(help="Tokens read at once: more reads prompts faster, fewer answers more evenly. [default: 256]"),
    ] = None,
    cache_positions: Annotated[int, typer.Option(help="Tokens whose keys and values are kept.")] = 16384,
    cache_format: Annotated[str, typer.Option(help="Of keys and values: e4m3, bf16 or fp32.")] = "e4m3",
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Of one prompt. [default: the model's]")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of one answer.")] = 4096,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests at once; more are refused.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of one request.")] = 2**20,
    max_connections: Annotated[int, typer.Option(min=16, help="Open at once; idle ones make room.")] = 1024,
    head_seconds: Annotated[float, _seconds("In which the head of a request has to arrive.")] = 10.0,
    body_seconds: Annotated[float, _seconds("In which a request has to arrive.")] = 10.0,
    send_seconds: Annotated[float, _seconds("In which a part of an answer has to be read.")] = 30.0,
    answer_seconds: Annotated[float, _seconds("After which an answer ends.")] = 600.0,
    drain_seconds: Annotated[float, _seconds("For answers to end in after SIGTERM or Ctrl-C.")] = 30.0,
    hub: Hub = False,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Print prompts, to stderr.")] = False,
    grpc_port: GrpcPort = 8001,
    metrics_port: MetricsPort = 8002,
    triton_env: TritonEnvironment = None,
    ready_seconds: ReadySeconds = 120.0,
) -> None:
    """Serve a model over HTTP."""
    _check_options(context, engine)
    check_server_packages()
    if engine == TRITON:
        serve_repository(
            Path(model),
            ports=(port, grpc_port, metrics_port),
            host=host,
            insecure=insecure,
            environment=triton_env or default_environment(),
            ready_seconds=ready_seconds,
        )
        return
    check_choice("cache_format", cache_format, CACHE_FORMATS)
    config = EngineConfig(
        max_running=max_running,
        max_waiting=max_waiting,
        cache_positions=cache_positions,
        step_rows=max(256, max_running) if step_rows is None else step_rows,
        cache_format=CACHE_FORMATS[cache_format],
    )
    from octavo.server import Address, Limits, Server, Service, answer_not_ready

    limits = Limits(
        connections=max_connections,
        head_s=head_seconds,
        body_bytes=max_body_bytes,
        body_s=body_seconds,
        send_s=send_seconds,
        requests=max_requests,
        prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        answer_s=answer_seconds,
        drain_s=drain_seconds,
    )
    address, key = Address(host=host, port=port), None if api_key_file is None else read_api_key(api_key_file)
    with address.bind() as listening:  # a host that is not known is told first
        address.check_secure(key=key, insecure=insecure)
        told: Any = {"on_prompt": _show if log_prompts else _ignore, "on_warning": _warn}
        with open_display() as display, answer_not_ready(listening, limits=limits):
            display.phase("loading", None)
            served = load_served_model(model, recipe=recipe, calibration=calibration, hub=hub)
            service = Service.of(served, name or _name_of(model), config=config, limits=limits, **told)
        gc.freeze()  # Python would look through the model's and all modules' objects again for every body of many lists
        with closing(service):
            Server(service, key=key, host=host, on_ready=partial(_tell, service, listening)).run(sockets=[listening])


def check_server_packages() -> None:
    """Refuse to begin without what octavo's server is made of.

    Raises:
        ConfigError: a package is not installed.
    """
    try:
        import octavo.server  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serving needs starlette, uvicorn and prometheus-client; {INSTALL}") from error


def _check_options(context: typer.Context, engine: str) -> None:
    """Refuse an engine that there is not, and options of the other one."""
    check_choice("engine", engine, (OCTAVO, TRITON))
    for name in context.params:
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        of = TRITON if name in TRITON_OPTIONS else OCTAVO
        if given and name not in BOTH_ENGINES and of != engine:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --engine {of}, not to {engine}; leave it out")


def _name_of(model: str) -> str:
    """A file's without its ending, or the last part of a folder's or a hub's."""
    path = Path(model).resolve() if Path(model).exists() else Path(model)
    return path.stem if path.is_file() else path.name


def _tell(service: "Service", listening: socket) -> None:
    """Say what is served where: at the address itself, whatever name it was given by."""
    host, port = listening.getsockname()[:2]
    place = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    _say(f"{service.name} is served at {place}; Ctrl-C ends it")


def _show(prompt: str | list[int]) -> None:
    _say(f"prompt: {prompt!r}")


def _ignore(prompt: str | list[int]) -> None:
    """Prompts are nobody's business unless they are asked for."""


def _warn(sentence: str) -> None:
    _say(f"warning: {sentence}")


def _say(line: str) -> None:
    stderr().print(escape(line), soft_wrap=True)
