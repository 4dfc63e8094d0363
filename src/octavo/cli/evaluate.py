"""``octavo eval``: a model's loss on text, as it was trained, or in several formats side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options
from octavo.cli.compare_formats import LENGTH, SAMPLES, WINDOWS, Question, compare_formats, evaluate_model
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.contamination import readers_of, shares_read, warnings_of
from octavo.cli.data import DATA_HELP
from octavo.cli.progress import open_display, phases
from octavo.errors import ConfigError
from octavo.models.sources import SourceKind, kind_of, located
from octavo.quantization.comparison.variant_names import FORMATS
from octavo.quantization.comparison.variants import CENTRED, STATIC, TUNED
from octavo.text.corpus import Split
from octavo.training.evaluate import evaluate as measure
from octavo.training.held_out import BATCH_WINDOWS, batches_of, held_out, watching_forwards
from octavo.training.run_folder import TrainedRun, load_run

__all__ = ["evaluate"]


def evaluate(
    *,
    model: options.Model,
    source: Annotated[
        str | None,
        typer.Option("--data", help=f"{DATA_HELP} [default: a run's own; language-topics for other models]"),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="train, validation, test or all. [default: test of a run's own data, all of other data]"),
    ] = None,
    formats: Annotated[
        str | None, typer.Option("--compare", help=f"Compare formats, by commas: {', '.join(FORMATS)}.")
    ] = None,
    windows: Annotated[int | None, typer.Option(help=f"Windows of text. [default: {WINDOWS}]")] = None,
    context: Annotated[int | None, typer.Option(help=f"Tokens of a window. [default: {LENGTH}, or fewer]")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help=f"For {STATIC} and {CENTRED}: a folder of octavo calibrate. [default: calibrate now]"),
    ] = None,
    samples: Annotated[int | None, typer.Option(help=f"Windows to calibrate with now. [default: {SAMPLES}]")] = None,
    tuned: Annotated[Path | None, typer.Option("--qat", help=f"For {TUNED}: a folder of octavo qat.")] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Time a pass of each format too, at batch 1 and 16.")] = False,
    device: options.Device = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Print a model's loss and perplexity on text, or those of several formats of it beside BF16."""
    place = options.device_of(device)
    if source == "":
        raise ConfigError("--data is empty; give a file, a folder or a data set, or leave it out")
    if hub:
        located(model, hub=True)
    question = Question(
        model=model,
        source=source,
        split=split,
        windows=WINDOWS if windows is None else windows,
        length=context,
        calibration=calibration,
        samples=SAMPLES if samples is None else samples,
        tuned=tuned,
        speed=speed,
        device=place,
    )
    given = {"--calibration": calibration, "--samples": samples, "--qat": tuned, "--speed": speed or None}
    if formats is not None:
        compare_formats(question, [name.strip() for name in formats.split(",")], as_json=as_json)
        return
    _refuse(given, "goes with --compare; name the formats there, or leave it out")
    if kind_of(model) is not SourceKind.RUN:
        evaluate_model(question, as_json=as_json)
        return
    _refuse({"--windows": windows, "--context": context}, "is not for a run as it was trained; add --compare")
    run = load_run(model, device=None if device is None else place)
    _evaluate_run(run, Path(model), source, split, as_json=as_json)


def _refuse(given: Mapping[str, object], reason: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"{option} {reason}")


def _evaluate_run(run: TrainedRun, run_dir: Path, source: str | None, split: str | None, *, as_json: bool) -> None:
    """A run's loss with its own recipe; without a source on the test split of its own."""
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
    read, part = data.manifest["source"], data.manifest["split"]
    record = {
        "run": str(run_dir),
        "recipe": run.config.training.recipe,
        "step": run.step,
        "data": read,
        "split": part,
        "tokens": found.tokens,
        "nats": found.nats,
        "perplexity": found.perplexity,
    }
    shares = shares_read(readers_of(run_dir), read, part)
    if as_json:
        print_json(record | {"read_before": shares})
        return
    rows = [
        (name, number(value, 6) if isinstance(value, int | float) else str(value)) for name, value in record.items()
    ]
    print_table("Evaluation", ["", ""], rows)
    for warning in warnings_of(shares, read, part):
        stdout().print(warning, markup=False, soft_wrap=True)
