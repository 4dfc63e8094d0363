"""``octavo train``: train one run with one recipe."""

import math
import os
import shlex
import signal
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.console import number, print_json, print_table, stderr
from octavo.cli.progress import Display, open_display, phases
from octavo.cli.ranks import as_rank, start_ranks
from octavo.cli.thread_choice import sets_threads, threads_of
from octavo.errors import ConfigError
from octavo.memory import MIB
from octavo.parallel.process_group import Launch, place_of
from octavo.text.tokenizer import SMALLEST_VOCABULARY
from octavo.text.tokens import open_data, preparing
from octavo.training.branching import branch_state
from octavo.training.config import RunConfig
from octavo.training.events import Evaluated, Event, Notice, OnEvent, StepDone
from octavo.training.loop import train as run_training
from octavo.training.memory import check_run_fits
from octavo.training.precision_schedule import parse_schedule
from octavo.training.rank_layout import check_layout
from octavo.training.result import TrainResult
from octavo.training.run_folder import CONFIG, check_start, resumable_state
from octavo.training.setup import check_data

__all__ = ["train"]

DATA = "data"
BEGUN = "begun"  # noted by the launch that began the run in the folder


def train(
    *,
    invocation: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="The run's folder.")],
    recipe: Annotated[
        str | None, typer.Option(help="fp32, bf16, or a preset of octavo.recipes.names(). [default: tensorwise]")
    ] = None,
    as_served_by: options.AsServedBy = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Recipes and the fraction of the run at which each begins, such as bf16:0.0,fp8:0.8."),
    ] = None,
    autopilot: Annotated[
        bool | None,
        typer.Option("--autopilot/--no-autopilot", help="Fix the doctor's findings during training. [default: no]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, bit for bit.")] = False,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="CHECKPOINT", help="Begin at a checkpoint of another run, whatever its recipe."),
    ] = None,
    config: options.ConfigFile = None,
    source: options.Source = None,
    text_column: options.TextColumn = None,
    hub: options.DataHub = False,
    vocab_size: options.VocabSize = None,
    steps: options.Steps = None,
    lr: options.LearningRate = None,
    warmup: options.Warmup = None,
    batch_size: options.BatchSize = None,
    context: options.Context = None,
    seed: options.Seed = None,
    eval_interval: options.EvalInterval = None,
    checkpoint_interval: options.CheckpointInterval = None,
    threads: options.Threads = None,
    device: options.Device = None,
    log: Annotated[
        str | None, typer.Option(help="Loggers, such as tensorboard,wandb,mlflow,trackio. [default: tensorboard]")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks to start on this machine; see [parallel].")] = None,
    max_restarts: Annotated[int, typer.Option(help="Restarts by --nproc after a rank has ended.")] = 0,
    shard: Annotated[
        int | None, typer.Option(help="Ranks that share one replica's weights by FSDP2. [default: 1]")
    ] = None,
    tensor: Annotated[int | None, typer.Option(help="Ranks that share each layer. [default: 1]")] = None,
    sequence: Annotated[
        bool | None,
        typer.Option("--sequence/--no-sequence", help="Let those ranks share positions too. [default: no]"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a small language model with one recipe, on one rank or several."""
    if resume and start is not None:
        raise ConfigError("--resume continues the run in --out, and --from begins a new one; leave one of them out")
    if nproc is not None and place_of(os.environ) is None:
        start_ranks(nproc, max_restarts=max_restarts)
    with as_rank(shows_traceback=invocation.obj[0]) as launch:
        resume = resume or _goes_on(launch, out)
        run_config = options.configured(
            out / CONFIG if resume and config is None and (out / CONFIG).exists() else config,
            source=source,
            text_column=text_column,
            vocab_size=vocab_size,
            parallel={"shard": shard, "tensor": tensor, "sequence": sequence},
            recipe=recipe,
            as_served_by=as_served_by,
            precision_schedule=None if schedule is None else parse_schedule(schedule),
            autopilot=autopilot,
            steps=steps,
            lr=lr,
            warmup=warmup,
            batch_size=batch_size,
            context=context,
            seed=seed,
            eval_interval=eval_interval,
            checkpoint_interval=checkpoint_interval,
            threads=threads,
            device=device,
            log=None if log is None else [name for name in log.split(",") if name],
        )
        chooses_threads = threads is None and not sets_threads(config)
        begin = None if resume else start
        result = _train(out, run_config, launch, resume=resume, start=begin, chooses_threads=chooses_threads)
        if launch is None or launch.ranks.is_first:
            again = [*(["--hub"] if hub else []), *(["--nproc", str(launch.ranks.size)] if launch else [])]
            _finish(result, ["octavo", "train", "--out", str(out), "--resume", *again], as_json=as_json)
    if result.stopped_by is not None:
        raise typer.Exit(128 + signal.Signals[result.stopped_by])


def _goes_on(launch: Launch | None, out: Path) -> bool:
    """Return whether the ranks were restarted, and continue the run that this launch has begun."""
    return launch is not None and launch.attempt > 0 and launch.was_noted(BEGUN) and (out / CONFIG).exists()


def _train(
    out: Path,
    config: RunConfig,
    launch: Launch | None,
    *,
    resume: bool,
    start: Path | None,
    chooses_threads: bool,
) -> TrainResult:
    if launch is None:
        with open_display() as display:
            if chooses_threads:
                config = config.with_training(threads=threads_of(out, goes_on=resume))
            _prepare(out, config, display, resume=resume, start=start)
            return _run(out, config, display, resume=resume, start=start)
    with open_display(quiet=not launch.ranks.is_first) as display:
        with launch.first_goes_ahead("data"):
            if launch.ranks.is_first:
                if chooses_threads:
                    threads = threads_of(out, goes_on=resume, ranks=launch.local_size)
                    config = config.with_training(threads=threads)
                _prepare(out, config, display, resume=resume, start=start, ranks=launch.ranks.size)
                launch.note(BEGUN)
        threads = launch.ranks.gathered(config.training.threads)[0]
        return _run(out, config.with_training(threads=threads), display, resume=resume, start=start)


def _prepare(
    out: Path, config: RunConfig, display: Display, *, resume: bool, start: Path | None, ranks: int = 1
) -> None:
    """Check that the run can start, and prepare its text."""
    check_start(out, config, resume=resume)
    check_layout(config, ranks)  # independent of the text, so checked before it is read
    check_run_fits(config, SMALLEST_VOCABULARY)
    source, vocab_size = config.data.source, config.data.vocab_size
    with preparing(source, out / DATA, vocab_size=vocab_size, progress=phases(display)) as tokens:
        check_data(tokens, config)
        if resume:
            resumable_state(out, config, tokens)
        if start is not None:
            branch_state(start, config, tokens)


def _run(out: Path, config: RunConfig, display: Display, *, resume: bool, start: Path | None) -> TrainResult:
    on_event = _watch(display, config.training.recipe, config.training.steps)
    return run_training(config, out, data=open_data(out / DATA), resume=resume, start=start, on_event=on_event)


def _finish(result: TrainResult, again: list[str], *, as_json: bool) -> None:
    """Show the result, or the command that continues a run that was stopped."""
    if result.stopped_by is None:
        _show(result, as_json=as_json)
        return
    where = f"after step {result.step}, checkpoint saved" if result.step else "before the first step"
    stderr().print(
        f"stopped {where}; continue with: {shlex.join(again)}",
        soft_wrap=True,
        markup=False,
    )


def _watch(display: Display, recipe: str, steps: int) -> OnEvent:
    show = phases(display)
    show(f"train {recipe}", 0, steps)

    def on_event(event: Event) -> None:
        if isinstance(event, StepDone):
            note = f"loss {event.loss:.3f}, {event.tokens_per_second:,.0f} tokens/s"
            show(f"train {recipe}", event.step, event.steps, note)
        elif isinstance(event, Evaluated):
            display.say(f"step {event.step}: validation {event.nats:.4f} nats, perplexity {event.perplexity:.2f}")
        elif isinstance(event, Notice):
            display.say(event.text)

    return on_event


def _show(result: TrainResult, *, as_json: bool) -> None:
    record = {
        "run": str(result.run_dir),
        "steps": result.step,
        "train_nats": result.train_curve[-1][1] if result.train_curve else None,
        "validation_nats": result.validation_curve[-1][1] if result.validation_curve else None,
        "tokens_per_second": result.tokens_per_second,
        "peak_memory_mib": result.peak_memory_bytes / MIB,
        "converted_layers": result.converted,
        "checkpoint": str(result.checkpoint),
    }
    if as_json:
        print_json(record)
        return
    rows = [(name.replace("_", " "), _cell(value)) for name, value in record.items()]
    print_table("Run", ["", ""], rows)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return number(None)  # an already finished run has no speed
    return number(value, 5) if isinstance(value, int | float) else str(value)
