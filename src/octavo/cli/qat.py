"""``octavo qat``: fine-tune a language model so that it loses less in FP8."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo import recipes
from octavo.cli import options
from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.progress import open_display, phases
from octavo.cli.result_saving import save_or_keep
from octavo.cli.training_text import text_to_train_on
from octavo.convert import left_as_they_are, unfuse_experts
from octavo.errors import ConfigError
from octavo.files import check_room, claimed_folder
from octavo.language_model import LanguageModel, load_language_model
from octavo.quantization.qat.folder import bytes_of_qat, save_qat
from octavo.quantization.qat.run import QATResult, QATSettings, run_qat
from octavo.quantization.qat.tuning import TuneSettings
from octavo.quantization.windows import text_windows
from octavo.recipes import Recipe
from octavo.recipes.engines import get, served_recipe
from octavo.text.corpus import Split
from octavo.training.config import Device

__all__ = ["qat"]

DEFAULTS = TuneSettings()
VARIANT_TITLES = {
    "bf16": "original BF16",
    "fp8": "FP8 of the original",
    "bf16-tuned": "tuned BF16",
    "fp8-of-tuned": "FP8 of tuned BF16",
    "fp8-by-data": "FP8 of the original, rounded by data",
    "fp8-qat": "FP8 after QAT",
}


def qat(
    *,
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", help="Folder to write, new or empty.")],
    source: options.ModelText = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe: static, or a preset with dynamic scales. [default: static]")
    ] = None,
    granularity: Annotated[
        str | None, typer.Option(help="Weight scales of static per tensor, row or 128x128 block. [default: tensor]")
    ] = None,
    as_served_by: options.AsServedBy = None,
    scales: Annotated[
        str | None, typer.Option(help="Scales of static inputs: tracked, learned or frozen. [default: tracked]")
    ] = None,
    clip_gradients: Annotated[
        bool, typer.Option("--clip-gradients", help="Pass no gradient to values that saturate.")
    ] = False,
    skip: options.Skip = None,
    head: options.Head = False,
    steps: options.Steps = DEFAULTS.steps,
    batch_size: options.BatchSize = DEFAULTS.batch_size,
    context: Annotated[
        int | None, typer.Option(help=f"Tokens per window. [default: {DEFAULTS.context}, or the model's context]")
    ] = None,
    by_data: Annotated[
        bool, typer.Option("--by-data", help="After the last step, round weights up or down to fit training windows.")
    ] = False,
    learning_rate: options.LearningRate = DEFAULTS.learning_rate,
    warmup: options.Warmup = DEFAULTS.warmup,
    high_precision_share: Annotated[
        float, typer.Option(help="Share of steps in high precision, at the beginning.")
    ] = DEFAULTS.high_precision_share,
    freeze_share: Annotated[
        float, typer.Option(help="Share of the other steps with frozen scales, at the end.")
    ] = DEFAULTS.freeze_share,
    distill: Annotated[
        float, typer.Option(help="Weight of the divergence from the BF16 model's logits, 0 to 1, in FP8 steps.")
    ] = DEFAULTS.distill,
    temperature: Annotated[float, typer.Option(help="Temperature of that divergence.")] = DEFAULTS.temperature,
    baseline: Annotated[bool, typer.Option("--baseline", help="Also tune a BF16 model, on the same batches.")] = False,
    eval_windows: Annotated[int, typer.Option(help="Held-out windows for the measurement.")] = 32,
    seed: options.WindowSeed = None,
    device: options.Device = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Fine-tune a language model for FP8, and compare it with one that was not."""
    tuning_options: dict[str, Any] = {
        "steps": steps, "batch_size": batch_size, "context": context, "learning_rate": learning_rate, "warmup": warmup,
        "seed": seed,
    }  # fmt: skip
    settings = QATSettings(
        **_casts(recipe, granularity, as_served_by, scales),
        clip_gradients=clip_gradients,
        skip=tuple(skip or ()),
        convert_head=head,
        by_data=by_data,
        baseline=baseline,
        tuning=TuneSettings(
            high_precision_share=high_precision_share,
            freeze_share=freeze_share,
            distill=distill,
            temperature=temperature,
            **{name: value for name, value in tuning_options.items() if value is not None},
        ),
    )
    place = options.device_of(device)
    with claimed_folder(out), open_display() as display:
        show = phases(display)
        show("read the model", 0, 1)
        loaded = _load(model, place, hub=hub)
        check_room(out, bytes_of_qat(loaded))
        if context is None:
            shorter = replace(settings.tuning, context=min(DEFAULTS.context, loaded.context))
            settings = replace(settings, tuning=shorter)
        show("read the text", 0, 1)
        text = text_to_train_on(model) if source is None else source
        size: dict[str, Any] = {"length": settings.tuning.context, "seed": settings.tuning.seed}
        training = text_windows(loaded, text, Split.TRAIN, count=settings.tuning.windows, **size)
        held_out = text_windows(loaded, text, Split.TEST, count=eval_windows, **size)
        result = run_qat(loaded, settings, training=training, held_out=held_out, on_phase=show)
        show("write", 0, 1)
        save = partial(save_qat, result=result, source=text, split=Split.TRAIN)
        result_folder, save_error = save_or_keep(out, save, command="qat", nbytes=bytes_of_qat(loaded))
    _show(result, result_folder, left_as_they_are(loaded.model), as_json=as_json)
    if save_error is not None:
        raise save_error


def _load(model: str, place: Device, *, hub: bool) -> LanguageModel:
    loaded = load_language_model(model, device=place, hub=hub)
    unfuse_experts(loaded.model)
    return loaded


def _casts(name: str | None, granularity: str | None, engine: str | None, scales: str | None) -> dict[str, Any]:
    """Settings that --recipe or --as-served-by defines."""
    if engine is None:
        recipe, profile = _recipe(name or "static", granularity), None
    elif name is not None:
        raise ConfigError("--recipe and --as-served-by both define the casts; leave one of them out")
    elif granularity is not None:
        raise ConfigError("--granularity and --as-served-by both define the casts; leave one of them out")
    else:
        profile = get(engine)
        recipe = served_recipe(profile)
    return {"recipe": recipe, "engine": profile, "scales": _scales(recipe, scales)}


def _recipe(name: str, granularity: str | None) -> Recipe:
    if granularity is None:
        return recipes.get(name)
    if name != "static":
        raise ConfigError(f"--granularity needs recipe 'static', not {name!r}, which has a granularity of its own")
    return recipes.get(name, weight_granularity=granularity)


def _scales(recipe: Recipe, given: str | None) -> str:
    if given is not None and not recipe.has_static_input:
        raise ConfigError(
            f"--scales needs static inputs, but recipe {recipe.name!r} has dynamic scales; leave --scales out, or use "
            "static"
        )
    return given or "tracked"


def _show(result: QATResult, out: Path | None, left: str, *, as_json: bool) -> None:
    record = {
        name: {
            "perplexity": result.perplexity(name),
            "nats_above_reference": None if name == result.reference else result.gap(name).nats,
            "standard_error": None if name == result.reference else result.gap(name).standard_error,
            "percent_above_reference": None if name == result.reference else result.gap(name).percent,
        }
        for name in result.windows
    }
    if as_json:
        output = {"out": None if out is None else str(out), "reference": result.reference, "measured": record}
        print_json(output | ({"left": left} if left else {}))
        return
    rows = [
        (VARIANT_TITLES[name], number(measurement["perplexity"], 5), *_difference(measurement))
        for name, measurement in record.items()
    ]
    windows = len(next(iter(result.windows.values())))
    print_table(
        f"Held-out perplexity of {windows} windows, compared with {VARIANT_TITLES[result.reference]}",
        ["", "perplexity", "difference", "nats", "± standard error"],
        rows,
    )
    if left:
        print_lines(f"{left}.")
    if out is not None:
        print_lines(f"written to {out}; read it with octavo.quantization.load_qat")


def _difference(measurement: dict[str, float | None]) -> tuple[str, str, str]:
    if measurement["nats_above_reference"] is None:
        return ("", "", "")
    return (
        f"{measurement['percent_above_reference']:+.2f} %",
        f"{measurement['nats_above_reference']:+.4f}",
        f"{measurement['standard_error']:.4f}",
    )
