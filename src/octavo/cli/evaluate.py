"""``octavo eval``: a run's loss on text."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.console import number, print_json, print_table
from octavo.cli.progress import open_display, phases
from octavo.cli.runs import check_is_run
from octavo.errors import ConfigError
from octavo.training.corpus import Split
from octavo.training.evaluate import evaluate as measure
from octavo.training.held_out import BATCH_WINDOWS, batches_of, held_out, watching_forwards
from octavo.training.run_folder import load_run

__all__ = ["evaluate"]


def evaluate(
    *,
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    source: options.Source = None,
    split: Annotated[
        str | None,
        typer.Option(help="train, validation, test or all. [default: test of the run's own data, all of other data]"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print a run's loss and perplexity on text; without --data on the test split of its own."""
    check_is_run(run_dir)
    if source == "":
        raise ConfigError("--data is empty; give a file, a folder or a data set, or leave it out")
    run = load_run(run_dir)
    context = run.config.training.context
    with open_display() as display:
        show = phases(display)
        data = held_out(
            run, run_dir, source=source, split=split, on_document=lambda done, total: show("encode", done, total)
        )
        total = batches_of(data, context)
        with watching_forwards(run.model, lambda done: show("evaluate", done, total)):
            found = measure(
                run.model,
                data,
                context=context,
                split=Split.TEST,
                batch_size=BATCH_WINDOWS,
                surroundings=run.surroundings,
            )
    record = {
        "run": str(run_dir),
        "recipe": run.config.training.recipe,
        "step": run.step,
        "data": data.manifest["source"],
        "split": data.manifest["split"],
        "tokens": found.tokens,
        "nats": found.nats,
        "perplexity": found.perplexity,
    }
    if as_json:
        print_json(record)
        return
    rows = [
        (name, number(value, 6) if isinstance(value, int | float) else str(value)) for name, value in record.items()
    ]
    print_table("Evaluation", ["", ""], rows)
