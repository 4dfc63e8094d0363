"""``octavo study``: train one model in several precisions, on your own text and configuration."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.study_run import compare, print_study
from octavo.cli.thread_choice import sets_threads, threads_of
from octavo.experiments.study import DEFAULT_RECIPES

__all__ = ["study"]


def study(
    *,
    out: Annotated[Path, typer.Option("--out", help="The study's folder.")] = Path("runs/study"),
    recipes: Annotated[str, typer.Option(help="Recipes separated by commas, baseline first.")] = ",".join(
        DEFAULT_RECIPES
    ),
    prompt: Annotated[str | None, typer.Option(help="Prompt for the trained models to continue.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Start over in a folder that holds a study.")] = False,
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
    as_json: options.Json = False,
) -> None:
    """Train one model in several precisions, all else equal, and measure what each costs.

    A second call skips finished runs and resumes an interrupted one.
    """
    del hub  # its option opens the Hub
    run_config = options.configured(
        config,
        source=source,
        text_column=text_column,
        vocab_size=vocab_size,
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
    )
    if threads is None and not sets_threads(config):
        run_config = run_config.with_training(threads=threads_of(out, goes_on=not force))
    recipe_names = tuple(name.strip() for name in recipes.split(",") if name.strip())
    study_result = compare(run_config, out, recipes=recipe_names, prompt=prompt, force=force)
    print_study(study_result, run_config, out, as_json=as_json)
