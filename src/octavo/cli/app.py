"""The ``octavo`` application: its commands, and the handling of their errors.

``OctavoError`` and ``OSError`` (a full disk, a missing permission) end a command with one sentence on stderr and exit
code 2. Ctrl-C ends it with 130 and SIGTERM with 143, after temporary files are removed. ``--debug``, before or after
the command's name, shows the traceback. Other exceptions are defects of octavo and always have a traceback.

``-v`` and ``-q``, as free in their place, choose what octavo's loggers print (octavo/cli/verbosity.py).

A command's module is imported when the command is called: all of them take a second longer than one.
"""

import importlib
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from octavo._lazy import own_version
from octavo.cli.console import Terminated, complain, sentence_of
from octavo.cli.verbosity import Verbosity, logging_to_stderr
from octavo.errors import OctavoError
from octavo.text.sources import is_unicode
from octavo.training.signals import StoppedBySignal

__all__ = ["app", "main"]

BAD_INPUT = 2
UNHARMED = "interrupted; nothing is half-written; training, tuning and studies continue from their last checkpoint"
DEBUG = "--debug"
VERBOSITY = {
    **dict.fromkeys(("-v", "--verbose"), Verbosity.VERBOSE),
    **dict.fromkeys(("-q", "--quiet"), Verbosity.QUIET),
}
GROUPS = {  # headings of the list of commands; the first are those on the way from a plain model to a served one
    "Commands": ("demo", "train", "study", "doctor", "eval", "calibrate", "export", "serve"),
    "More on models": ("generate", "qat", "sensitivity", "agree", "import"),
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


class LateCommand(NamedTuple):
    """A command, or a group of them, that is imported when it is called.

    Attributes:
        place: its module in octavo.cli, and its name there.
        short: its line in the list of commands.
        example: what its help shows after ``octavo``.
    """

    place: str
    short: str
    example: str


COMMANDS = {
    "demo": LateCommand("demo:demo", "See FP32, BF16 and FP8 train on real text, side by side.", "demo --quick"),
    "study": LateCommand(
        "study:study",
        "Compare precisions on your own text and model shape.",
        "study --data my-texts/ --steps 1000 --out runs/mine",
    ),
    "train": LateCommand(
        "train:train",
        "Train a small language model with one recipe.",
        "train --recipe rowwise --data novel.txt --steps 500 --out runs/novel",
    ),
    "eval": LateCommand(
        "evaluate:evaluate",
        "Measure a model's perplexity, or compare formats of it.",
        "eval model.gguf --compare bf16,int8,fp8-dynamic,fp8-static",
    ),
    "calibrate": LateCommand(
        "calibrate:calibrate",
        "Find static FP8 scales for a trained model.",
        "calibrate model.gguf --samples 128 --out calibrated/",
    ),
    "generate": LateCommand(
        "generate:generate",
        "Continue a prompt with a trained model.",
        "generate runs/demo/tensorwise --prompt 'def main('",
    ),
    "qat": LateCommand(
        "qat:qat",
        "Fine-tune a language model so that it loses less in FP8.",
        "qat model.gguf --data novel.txt --steps 200 --baseline --out runs/qat",
    ),
    "sensitivity": LateCommand(
        "sensitivity:show_sensitivity",
        "Rank layers by what FP8 costs them; find the best mix.",
        "sensitivity model.gguf --budget-perplexity 1.0% --budget-bytes 0.60 --out runs/mix",
    ),
    "agree": LateCommand(
        "agree:show_agreement",
        "Find whether trainer and server compute the same, and why not.",
        "agree model.gguf --trainer te-block --server vllm-block --why",
    ),
    "export": LateCommand(
        "export:export",
        "Write a model in FP8 as servers read it, and verify it.",
        "export model.gguf --format compressed-tensors --out served/",
    ),
    "serve": LateCommand(
        "serve:serve", "Serve a model over HTTP, as OpenAI's API and KServe's.", "serve model.gguf --port 8000"
    ),
    "triton": LateCommand("triton:triton", "Set up Triton Inference Server, without a container.", "triton setup"),
    "import": LateCommand(
        "import_:import_", "Read and check a model in FP8 from another tool.", "import served/ --out own/"
    ),
    "doctor": LateCommand("doctor:doctor", "Find what goes wrong in FP8 training, and why.", "doctor runs/mine"),
    "plan": LateCommand(
        "plan:plan",
        "Predict what FP8 gains on many GPUs: time, memory, cost.",
        "plan --model llama-3-70b --hardware h100 --gpus 1024 --tokens 2T --price 2.5/h",
    ),
    "advise": LateCommand(
        "plan:advise_on_model",
        "Say whether to train a model in FP8, and why.",
        "advise llama-3-8b --hardware h100 --gpus 64",
    ),
    "data": LateCommand(
        "data:data", "Show a source's documents and bytes, by split and kind.", "data --data my-texts/"
    ),
    "bench": LateCommand(
        "bench_group:bench",
        "Measure serving: latency, throughput and memory.",
        "bench serve model.gguf --batch 1,16",
    ),
    "formats": LateCommand(
        "formats:formats", "Print range, precision and counts of the number formats.", "formats --errata"
    ),
}


class LateCommands(Mapping[str, Any]):
    """The commands by name; looking one up imports it."""

    def __getitem__(self, name: str) -> Any:
        late = COMMANDS[name]
        module, attribute = late.place.split(":")
        command = getattr(importlib.import_module(f"octavo.cli.{module}"), attribute)
        holder = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
        words: dict[str, Any] = {"name": name, "short_help": late.short, "epilog": f"Example: octavo {late.example}"}
        if isinstance(command, typer.Typer):
            holder.add_typer(command, **words)
        else:
            holder.command(**words)(command)
        return typer.main.get_group(holder).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class MainGroup(ErrorBoundary):
    """``octavo``, whose help lists commands by what they are for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LateCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by group; typer's own panels need rich's markup mode."""
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, COMMANDS[name].short) for name in names])


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


def main() -> None:
    """Entry point of the ``octavo`` script."""
    app(prog_name="octavo")
