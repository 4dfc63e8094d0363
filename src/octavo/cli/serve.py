"""``octavo serve``: serve a model over HTTP with the APIs of OpenAI and KServe, and a chat page.

With ``--engine triton``, Triton's server runs on a repository of ``octavo export --format triton``.
"""

import gc
import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import print_lines
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
from octavo.formats import BF16, E4M3, FP32, Format
from octavo.inference import (
    EngineConfig,
    Runner,
    ServedModel,
    ServingRecipe,
    load_served_model,
    load_served_model_as,
)
from octavo.inference.profile_runner import cache_format_of
from octavo.nn.arguments import check_choice
from octavo.recipes.engines import get

if TYPE_CHECKING:
    from octavo.server import Service

__all__ = ["check_server_packages", "serve"]

RECIPES = ", ".join(ServingRecipe)
CACHE_FORMATS = {"e4m3": E4M3, "bf16": BF16, "fp32": FP32}
INSTALL = "pip install 'octavo[serve]'"
OCTAVO, TRITON = "octavo", "triton"
BOTH_ENGINES = {"model", "engine", "host", "port", "insecure"}  # options that both engines have


def _check_seconds(option: typer.CallbackParam, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{option.opts[0]} takes a positive number of seconds, not {value:g}")
    return value


def _seconds(about: str) -> Any:  # as typer.Option itself
    """Option for a positive, finite time in seconds."""
    return typer.Option(help=about, callback=_check_seconds)


def serve(
    *,
    context: typer.Context,
    model: Model,
    engine: Annotated[str, typer.Option(help="octavo, or triton; MODEL is then a repository.")] = OCTAVO,
    recipe: Annotated[
        str | None, typer.Option(help=f"Formats of weights and activations: {RECIPES}. [default: fp8]")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="ENGINE", help="Compute as another engine does, such as vllm-token; see octavo agree."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of octavo calibrate, for fp8-static.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name for clients. [default: the file's or folder's]")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the API key that clients must send.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines connect without a key.")] = False,
    max_running: Annotated[int, typer.Option(help="Answers generated at once.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Answers in the queue; more are refused.")] = 64,
    step_rows: Annotated[
        int | None,
        typer.Option(help="Tokens per step: more reads prompts faster, fewer answers more evenly. [default: 256]"),
    ] = None,
    cache_positions: Annotated[int, typer.Option(help="Tokens in the cache of keys and values.")] = 16384,
    cache_format: Annotated[
        str | None, typer.Option(help="Format of keys and values: e4m3, bf16 or fp32. [default: e4m3]")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a prompt. [default: the model's context]")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 4096,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests at once; more are refused.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of a request.")] = 2**20,
    max_connections: Annotated[
        int, typer.Option(min=16, help="Open connections; idle ones are closed for new ones.")
    ] = 1024,
    head_seconds: Annotated[float, _seconds("Time limit for the head of a request.")] = 10.0,
    body_seconds: Annotated[float, _seconds("Time limit for the body of a request.")] = 10.0,
    send_seconds: Annotated[float, _seconds("Time limit for a client to read a part of an answer.")] = 30.0,
    answer_seconds: Annotated[float, _seconds("Time limit for an answer.")] = 600.0,
    drain_seconds: Annotated[float, _seconds("Time for answers to finish after SIGTERM or Ctrl-C.")] = 30.0,
    hub: Hub = False,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Print prompts to stderr.")] = False,
    grpc_port: GrpcPort = 8001,
    metrics_port: MetricsPort = 8002,
    triton_env: TritonEnvironment = None,
    ready_seconds: ReadySeconds = 120.0,
) -> None:
    """Serve a model over HTTP."""
    _check_options(context, engine)
    check_server_packages()
    if engine == TRITON:
        ports, environment = (port, grpc_port, metrics_port), triton_env or default_environment()
        serve_repository(
            Path(model), ports=ports, host=host, insecure=insecure, environment=environment, ready_seconds=ready_seconds
        )
        return
    load, cache = _loader(model, profile, recipe, calibration, cache_format, hub=hub)
    config = EngineConfig(
        max_running=max_running,
        max_waiting=max_waiting,
        cache_positions=cache_positions,
        step_rows=max(256, max_running) if step_rows is None else step_rows,
        cache_format=cache,
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
    with address.bind() as listening_socket:  # report an unknown host first
        address.check_secure(key=key, insecure=insecure)
        callbacks: Any = {"on_prompt": _print_prompt} if log_prompts else {}  # prompts may be private
        with open_display() as display, answer_not_ready(listening_socket, limits=limits):
            display.phase("loading", None)
            service = Service.of(
                load(), name or _name_of(model), config=config, limits=limits, on_warning=_warn, **callbacks
            )
        gc.freeze()  # keep the collector from traversing the model and all modules after every large request
        with closing(service):
            Server(service, key=key, host=host, on_ready=partial(_print_address, service, listening_socket)).run(
                sockets=[listening_socket]
            )


def check_server_packages() -> None:
    """Check that the packages of octavo's server are installed.

    Raises:
        ConfigError: a package is not installed.
    """
    try:
        import octavo.server  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serving needs starlette, uvicorn and prometheus-client; {INSTALL}") from error


def _check_options(context: typer.Context, engine: str) -> None:
    """Raise ConfigError for an unknown engine, or for options of the other engine."""
    check_choice("engine", engine, (OCTAVO, TRITON))
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        engine_of_option = TRITON if name in TRITON_OPTIONS else OCTAVO
        if is_given and name not in BOTH_ENGINES and engine_of_option != engine:
            raise ConfigError(
                f"{parameter.opts[0]} belongs to --engine {engine_of_option}, not to {engine}; leave it out"
            )


def _loader(
    model: str,
    profile: str | None,
    recipe: str | None,
    calibration: Path | None,
    cache_format: str | None,
    *,
    hub: bool,
) -> tuple[Callable[[], ServedModel[Runner]], Format]:
    """Function that loads the model, and the format of its keys and values; checks options before reading it."""
    if profile is None:
        cache = "e4m3" if cache_format is None else cache_format
        check_choice("cache_format", cache, CACHE_FORMATS)
        formats = ServingRecipe.FP8 if recipe is None else recipe
        return partial(load_served_model, model, recipe=formats, calibration=calibration, hub=hub), CACHE_FORMATS[cache]
    engine = get(profile)
    for option, value in {"recipe": recipe, "calibration": calibration, "cache-format": cache_format}.items():
        if value is not None:
            raise ConfigError(f"--as {profile} defines every cast and the cache; leave --{option} out")
    return partial(load_served_model_as, model, engine, hub=hub), cache_format_of(engine)


def _name_of(model: str) -> str:
    """Default model name: a file's stem, or the last part of a folder or Hub name."""
    path = Path(model).resolve() if Path(model).exists() else Path(model)
    return path.stem if path.is_file() else path.name


def _print_address(service: "Service", listening_socket: socket) -> None:
    """Print the model's name and the numeric address it is served at."""
    host, port = listening_socket.getsockname()[:2]
    place = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print_lines(f"{service.name} is served at {place}; press Ctrl-C to stop", to_stderr=True)


def _print_prompt(prompt: str | list[int]) -> None:
    print_lines(f"prompt: {prompt!r}", to_stderr=True)


def _warn(sentence: str) -> None:
    print_lines(f"warning: {sentence}", to_stderr=True)
