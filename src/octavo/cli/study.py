"""``octavo study``: train one model in several precisions, on your own text and configuration."""

import os
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.study_grid import GridOptions, Sharing, refuse, study_grid
from octavo.cli.study_run import compare, print_study
from octavo.cli.thread_choice import sets_threads, threads_of
from octavo.experiments.presets import PRESETS
from octavo.experiments.study import DEFAULT_RECIPES
from octavo.parallel.process_group import place_of

__all__ = ["study"]


def study(
    *,
    out: Annotated[Path, typer.Option("--out", help="The study's folder.")] = Path("runs/study"),
    recipes: Annotated[str, typer.Option(help="Recipes separated by commas, baseline first.")] = ",".join(
        DEFAULT_RECIPES
    ),
    seeds: Annotated[
        int, typer.Option(min=1, help="Seeds of weights and batches; several give gaps with intervals.")
    ] = 1,
    lr_factors: Annotated[str, typer.Option(help="Factors of the learning rate, separated by commas.")] = "1",
    warmup_factors: Annotated[str, typer.Option(help="Factors of the warm-up, separated by commas.")] = "1",
    preset: Annotated[str | None, typer.Option(help=f"Rerun published claims: {', '.join(PRESETS)}.")] = None,
    bars: Annotated[
        Path | None, typer.Option(help="TOML file of what counts as a loss, fixed before the first run.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the runs of several seeds.")] = 1,
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

    A second call skips finished runs and resumes an interrupted one. Processes on one folder share the runs of several
    seeds: those of --jobs, ranks of torchrun or srun, or the same command started by Ray or in other shells.
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
    chooses_threads, place = threads is None and not sets_threads(config), place_of(os.environ)
    recipe_names = tuple(name.strip() for name in recipes.split(",") if name.strip())
    grid_options = GridOptions(seeds=seeds, lr_factors=lr_factors, warmup_factors=warmup_factors, preset=preset)
    if grid_options.is_one_run:
        refuse(bars is not None, "--bars", "several seeds or factors; add --seeds 5")
        refuse(jobs > 1, "--jobs", "several seeds or factors; add --seeds 5")
        refuse(place is not None and place.size > 1, "a launch of several ranks", "several seeds; add --seeds 5")
    else:
        refuse(prompt is not None, "--prompt", "one seed; leave it out")
        refuse(force, "--force", "one seed; remove the folder, or name another with --out")
        refuse(jobs > 1 and place is not None, "--jobs", "one process; each rank of a launch is one, so leave it out")
        names = None if recipes == ",".join(DEFAULT_RECIPES) else recipe_names
        grid, chosen = grid_options.grid(names, first_seed=run_config.training.seed)
        sharing = Sharing(jobs=jobs, place=place, chooses_threads=chooses_threads)
        study_grid(run_config, out, grid=grid, preset=chosen, bars=bars, sharing=sharing, as_json=as_json)
        return
    if chooses_threads:
        run_config = run_config.with_training(threads=threads_of(out, goes_on=not force))
    study_result = compare(run_config, out, recipes=recipe_names, prompt=prompt, force=force)
    print_study(study_result, run_config, out, as_json=as_json)
