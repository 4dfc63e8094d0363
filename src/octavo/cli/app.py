"""The ``octavo`` application: its commands, and the handling of their errors.

``OctavoError`` and ``OSError`` (a full disk, a missing permission) end a command with one sentence on stderr and exit
code 2. Ctrl-C ends it with 130 and SIGTERM with 143, after temporary files are removed. ``--debug``, before or after
the command's name, shows the traceback. Other exceptions are defects of octavo and always have a traceback.

``-v`` and ``-q``, as free in their place, choose what octavo's loggers print (octavo/cli/verbosity.py).
"""

import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo._lazy import own_version
from octavo.cli.bench_group import bench
from octavo.cli.calibrate import calibrate
from octavo.cli.console import Terminated, complain, sentence_of
from octavo.cli.data import data
from octavo.cli.demo import demo
from octavo.cli.doctor import doctor
from octavo.cli.evaluate import evaluate
from octavo.cli.export import export
from octavo.cli.formats import formats
from octavo.cli.generate import generate
from octavo.cli.import_ import import_
from octavo.cli.plan import advise_on_model, plan
from octavo.cli.qat import qat
from octavo.cli.sensitivity import show_sensitivity
from octavo.cli.serve import serve
from octavo.cli.study import study
from octavo.cli.train import train
from octavo.cli.triton import triton
from octavo.cli.verbosity import Verbosity, logging_to_stderr
from octavo.errors import OctavoError
from octavo.text.sources import is_unicode
from octavo.training.signals import StoppedBySignal

__all__ = ["app", "main"]

BAD_INPUT = 2
UNHARMED = "interrupted; nothing is half-written, and the same command continues where a checkpoint was saved"
DEBUG = "--debug"
VERBOSITY = {
    **dict.fromkeys(("-v", "--verbose"), Verbosity.VERBOSE),
    **dict.fromkeys(("-q", "--quiet"), Verbosity.QUIET),
}
GROUPS = {  # headings of the list of commands; the first are those on the way from a plain model to a served one
    "Commands": ("demo", "train", "study", "doctor", "eval", "calibrate", "export", "serve"),
    "More on models": ("generate", "qat", "sensitivity", "import"),
    "Before renting GPUs": ("plan", "advise"),
    "Data, formats and serving": ("data", "formats", "bench", "triton"),
}


@contextmanager
def _unwinding_on_signals(received: list[int]) -> Iterator[None]:
    """Raise an exception in the block on SIGTERM or Ctrl-C, so that ``finally`` clauses remove temporary folders.

    Signals are recorded, since a library may catch the exception and raise another: an import that is interrupted in
    torch's exporter becomes an ImportError about a circular import. A second signal has its default effect. A signal
    that is already ignored or handled stays so.

    Args:
        received: list to which the numbers of signals are appended.
    """
    is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: handler for number, handler in usual.items() if is_main and signal.getsignal(number) is handler}

    def unwind(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    for number in before:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ErrorBoundary(TyperGroup):
    """Command group that converts errors to one sentence and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``--debug``, ``-v`` and ``-q`` anywhere; reject what is not Unicode, which JSON cannot hold."""
        for arg in args:
            if not is_unicode(arg):
                complain(f"{arg!r} is not UTF-8; write it in UTF-8, or rename the file")
                raise typer.Exit(BAD_INPUT)
        options = args[: args.index("--")] if "--" in args else args
        levels = [VERBOSITY[arg] for arg in options if arg in VERBOSITY]
        ctx.obj = (DEBUG in options, levels[-1] if levels else Verbosity.NORMAL)
        rest = [arg for arg in options if arg != DEBUG and arg not in VERBOSITY]
        return super().parse_args(ctx, rest + args[len(options) :])

    def invoke(self, ctx: Any) -> Any:
        """Run the command and handle its errors."""
        received: list[int] = []
        shows_traceback, verbosity = ctx.obj
        try:
            with _unwinding_on_signals(received), logging_to_stderr(verbosity):
                return super().invoke(ctx)
        except BaseException as error:
            if isinstance(error, StoppedBySignal):
                received.append(error.number)
            elif isinstance(error, KeyboardInterrupt):
                received.append(signal.SIGINT)
            if received:
                if not isinstance(error, typer.Exit):  # which has been explained
                    complain(UNHARMED)
                raise typer.Exit(128 + received[0]) from None
            if shows_traceback or isinstance(error, BrokenPipeError) or not isinstance(error, OctavoError | OSError):
                raise
            complain(sentence_of(error) if isinstance(error, OSError) else str(error))
            raise typer.Exit(BAD_INPUT) from None


class MainGroup(ErrorBoundary):
    """``octavo``, whose help lists commands by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by group; typer's own panels need rich's markup mode."""
        room = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(room)) for name in names])


app = typer.Typer(
    cls=MainGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would remove the [default: ...] of an option's help
    help="Train PyTorch models in FP8 and measure what it costs, on a Hopper GPU or on a CPU.",
    epilog="Start with: octavo demo",
)


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"octavo {own_version()}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error; may stand anywhere.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show log records too; may stand anywhere.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress or warnings; may stand anywhere.")
    ] = False,
    version: Annotated[  # eager: ends the command as soon as it is parsed
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print octavo's version.")
    ] = False,
) -> None:
    """Options before a command's name."""


def add_command(command: Callable[..., None], name: str, *, example: str, short: str | None = None) -> None:
    """Register a command; ``short`` is its line in the list of commands, by default the first line of its help."""
    line = short or inspect.getdoc(command)
    assert line is not None
    app.command(name=name, short_help=line.splitlines()[0], epilog=f"Example: octavo {name} {example}")(command)


add_command(demo, "demo", short="See FP32, BF16 and FP8 train on real text, side by side.", example="--quick")
add_command(
    study,
    "study",
    short="Compare precisions on your own text and model shape.",
    example="--data my-texts/ --steps 1000 --out runs/mine",
)
add_command(
    train,
    "train",
    short="Train a small language model with one recipe.",
    example="--recipe rowwise --data novel.txt --steps 500 --out runs/novel",
)
add_command(
    evaluate,
    "eval",
    short="Measure a model's perplexity, or compare formats of it.",
    example="model.gguf --compare bf16,int8,fp8-dynamic,fp8-static",
)
add_command(
    calibrate,
    "calibrate",
    short="Find static FP8 scales for a trained model.",
    example="model.gguf --samples 128 --out calibrated/",
)
add_command(generate, "generate", example="runs/demo/tensorwise --prompt 'def main('")
add_command(
    qat,
    "qat",
    short="Fine-tune a language model so that it loses less in FP8.",
    example="model.gguf --data novel.txt --steps 200 --baseline --out runs/qat",
)
add_command(
    show_sensitivity,
    "sensitivity",
    short="Rank layers by what FP8 costs them; find the best mix.",
    example="model.gguf --budget-perplexity 1.0% --budget-bytes 0.60 --out runs/mix",
)
add_command(
    export,
    "export",
    short="Write a model in FP8 as servers read it, and verify it.",
    example="model.gguf --format compressed-tensors --out served/",
)
add_command(
    serve,
    "serve",
    short="Serve a model over HTTP, as OpenAI's API and KServe's.",
    example="model.gguf --port 8000",
)
app.add_typer(
    triton,
    name="triton",
    short_help="Set up Triton Inference Server, without a container.",
    epilog="Example: octavo triton setup",
)
add_command(
    import_,
    "import",
    short="Read and check a model in FP8 from another tool.",
    example="served/ --out own/",
)
app.add_typer(
    doctor,
    name="doctor",
    short_help="Find what goes wrong in FP8 training, and why.",
    epilog="Example: octavo doctor runs/mine",
)
add_command(
    plan,
    "plan",
    short="Predict what FP8 gains on many GPUs: time, memory, cost.",
    example="--model llama-3-70b --hardware h100 --gpus 1024 --tokens 2T --price 2.5/h",
)
add_command(
    advise_on_model,
    "advise",
    short="Say whether to train a model in FP8, and why.",
    example="llama-3-8b --hardware h100 --gpus 64",
)
add_command(data, "data", example="--data my-texts/")
app.add_typer(
    bench,
    name="bench",
    short_help="Measure serving: latency, throughput and memory.",
    epilog="Example: octavo bench serve model.gguf --batch 1,16",
)
add_command(formats, "formats", short="Print range, precision and counts of the number formats.", example="--errata")


def main() -> None:
    """Entry point of the ``octavo`` script."""
    app(prog_name="octavo")
