"""``octavo demo``: the study on the built-in corpus, sized for a laptop."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.console import stdout
from octavo.cli.study_run import compare, print_study
from octavo.cli.thread_choice import threads_of
from octavo.experiments.study import DEFAULT_RECIPES
from octavo.training.config import demo_config

__all__ = ["demo"]

PROMPT = "    def __init__(self, "
FULL, QUICK = Path("runs/demo"), Path("runs/demo-quick")
QUICK_TEST_TOKENS = 8192


def demo(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer steps, smaller batches: about a minute on two free cores.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help=f"The demo's folder. [default: {FULL}, {QUICK} with --quick]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start over instead of resuming.")] = False,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; 0 uses torch's default. [default: free cores]")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a small language model in FP32, BF16 and FP8 on real text, and compare the three.

    A second call skips finished runs and resumes an interrupted one.
    """
    folder = out or (QUICK if quick else FULL)
    if threads is None:
        threads = threads_of(folder, goes_on=not force)
    config = demo_config(quick=quick).with_training(threads=threads)
    test_tokens = QUICK_TEST_TOKENS if quick else None
    study = compare(config, folder, recipes=DEFAULT_RECIPES, prompt=PROMPT, test_tokens=test_tokens, force=force)
    print_study(study, config, folder, as_json=as_json)
    if quick and not as_json:
        stdout().print("")
        stdout().print(quick_note(config.training.steps), markup=False)


def quick_note(steps: int) -> str:
    """Note on the limits of a quick demo's figures."""
    return (
        f"This was the quick demo: {steps} steps with one seed show that everything works but prove nothing about FP8. "
        "Differences this early are chance; for meaningful figures, run octavo demo."
    )
