"""``octavo eval``: a model's loss on text, as trained or in several formats."""

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options
from octavo.cli.compare_formats import (
    LENGTH,
    SAMPLES,
    WINDOWS,
    EvaluationRequest,
    compare_formats,
    evaluate_model,
    print_evaluation,
)
from octavo.cli.contamination import readers_of, shares_read
from octavo.cli.progress import open_display, phases
from octavo.errors import ConfigError
from octavo.models.sources import SourceKind, kind_of, located
from octavo.quantization.comparison.variants import CENTRED, FORMATS, STATIC, TUNED
from octavo.text.corpus import Split
from octavo.training.evaluate import evaluate as measure
from octavo.training.held_out import BATCH_WINDOWS, batches_of, held_out, watching_forwards
from octavo.training.run_folder import TrainedRun, load_run

__all__ = ["evaluate"]


def evaluate(
    *,
    model: options.Model,
    source: options.EvaluatedText = None,
    split: options.EvaluatedSplit = None,
    formats: Annotated[
        str | None, typer.Option("--compare", help=f"Formats to compare, separated by commas: {', '.join(FORMATS)}.")
    ] = None,
    windows: Annotated[int | None, typer.Option(help=f"Windows of text. [default: {WINDOWS}]")] = None,
    context: Annotated[
        int | None, typer.Option(help=f"Tokens per window. [default: {LENGTH}, or the model's context]")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help=f"Folder of octavo calibrate, for {STATIC} and {CENTRED}. [default: calibrate now]"),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help=f"Windows to calibrate with, without --calibration. [default: {SAMPLES}]")
    ] = None,
    tuned: Annotated[Path | None, typer.Option("--qat", help=f"Folder of octavo qat, for {TUNED}.")] = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time a forward pass of each format, at batch 1 and 16.")
    ] = False,
    device: options.Device = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Print a model's loss and perplexity on text, as it is or in several formats compared with BF16."""
    place = options.device_of(device)
    if source == "":
        raise ConfigError("--data is empty; give a file, a folder or a dataset name, or leave it out")
    if hub:
        located(model, hub=True)
    request = EvaluationRequest(
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
    comparison_options = {"--calibration": calibration, "--samples": samples, "--qat": tuned, "--speed": speed or None}
    if formats is not None:
        compare_formats(request, [name.strip() for name in formats.split(",")], as_json=as_json)
        return
    options.refuse_given(comparison_options, "{} needs --compare; add that, or leave it out")
    if kind_of(model) is not SourceKind.RUN:
        evaluate_model(request, as_json=as_json)
        return
    options.refuse_given(
        {"--windows": windows, "--context": context},
        "{} does not apply to a run evaluated as it was trained; add --compare, or leave it out",
    )
    run = load_run(model, device=None if device is None else place)
    _evaluate_run(run, Path(model), source, split, as_json=as_json)


def _evaluate_run(run: TrainedRun, run_dir: Path, source: str | None, split: str | None, *, as_json: bool) -> None:
    """Print a run's loss with its own recipe, by default on the test split of its own data."""
    context = run.config.training.context
    with open_display() as display:
        show = phases(display)
        data = held_out(
            run, run_dir, source=source, split=split, on_document=lambda done, total: show("encode", done, total)
        )
        total = batches_of(data, context)
        with watching_forwards(run.model, lambda done: show("evaluate", done, total)):
            evaluation = measure(
                run.model,
                data,
                context=context,
                split=Split.TEST,
                batch_size=BATCH_WINDOWS,
                surroundings=run.surroundings,
            )
    data_source, data_split = data.manifest["source"], data.manifest["split"]
    record: dict[str, Any] = {
        "run": str(run_dir),
        "recipe": run.config.training.recipe,
        "step": run.step,
        "data": data_source,
        "split": data_split,
        "tokens": evaluation.tokens,
        "nats": evaluation.nats,
        "perplexity": evaluation.perplexity,
    }
    record["read_before"] = shares_read(readers_of(run_dir), data_source, data_split)
    print_evaluation(record, as_json=as_json)
