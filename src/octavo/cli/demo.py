"""``octavo demo``: the study on the built-in corpus, sized for a laptop."""

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from octavo.cli import options
from octavo.cli.comparing import compare, print_study
from octavo.cli.console import stderr, stdout
from octavo.training.config import demo_config, load_config
from octavo.training.run_folder import CONFIG
from octavo.training.study import DEFAULT_RECIPES
from octavo.training.threads import busy_cores, free_threads

__all__ = ["demo"]

PROMPT = "    def __init__(self, "
FULL, QUICK = Path("runs/demo"), Path("runs/demo-quick")
QUICK_TEST_TOKENS = 8192


def demo(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="The same model, fewer steps of smaller batches: under a minute.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help=f"The demo's folder. [default: {FULL}, {QUICK} with --quick]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start over instead of skipping what is done.")] = False,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; 0 leaves torch's choice. [default: as many as cores are free]")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a small language model in FP32, BF16 and FP8 on real text, and compare the three.

    A second call skips what is finished and resumes what was interrupted.
    """
    folder = out or (QUICK if quick else FULL)
    if threads is None:
        threads = chosen_threads(folder, is_new=force or not (folder / CONFIG).exists())
    config = demo_config(quick=quick).with_training(threads=threads)
    test_tokens = QUICK_TEST_TOKENS if quick else None
    found = compare(config, folder, recipes=DEFAULT_RECIPES, prompt=PROMPT, test_tokens=test_tokens, force=force)
    print_study(found, config, folder, as_json=as_json)
    if quick and not as_json:
        stdout().print("")
        stdout().print(quick_note(config.training.steps), markup=False)


def chosen_threads(folder: Path, *, is_new: bool) -> int:
    """The number that a demo in the folder began with; for a new one, torch's number or the free cores if fewer."""
    if not is_new:
        return load_config(folder / CONFIG).training.threads
    cores, busy, most = os.cpu_count() or 1, busy_cores(), torch.get_num_threads()
    threads = free_threads(cores=cores, busy=busy, most=most)
    if threads < most:
        stderr().print(busy_note(cores=cores, busy=busy, threads=threads), soft_wrap=True, markup=False)
    return threads


def busy_note(*, cores: int, busy: int, threads: int) -> str:
    """Why fewer threads are used than torch would."""
    plural = "" if threads == 1 else "s"
    verb = "is" if busy == 1 else "are"
    return f"{busy} of {cores} cores {verb} busy; training with {threads} thread{plural} (--threads to choose)"


def quick_note(steps: int) -> str:
    """What the figures of a quick demo are worth."""
    return (
        f"This was the quick demo: {steps} steps of one seed show that everything works and prove nothing about FP8. "
        "Differences this early are chance; for figures, run octavo demo."
    )
