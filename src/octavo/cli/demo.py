"""``octavo demo``: the study on the built-in corpus, sized for a laptop."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.comparing import compare, print_study
from octavo.training.config import demo_config
from octavo.training.study import DEFAULT_RECIPES

__all__ = ["demo"]

PROMPT = "    def __init__(self, "
FULL, QUICK = Path("runs/demo"), Path("runs/demo-quick")
QUICK_TEST_TOKENS = 8192


def demo(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model and fewer steps: under a minute.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help=f"The demo's folder. [default: {FULL}, {QUICK} with --quick]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start over instead of skipping what is done.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train a small language model in FP32, BF16 and FP8 on real text, and compare the three.

    A second call skips what is finished and resumes what was interrupted.
    """
    folder = out or (QUICK if quick else FULL)
    config = demo_config(quick=quick)
    test_tokens = QUICK_TEST_TOKENS if quick else None
    found = compare(config, folder, recipes=DEFAULT_RECIPES, prompt=PROMPT, test_tokens=test_tokens, force=force)
    print_study(found, config, folder, as_json=as_json)
