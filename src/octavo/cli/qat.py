"""``octavo qat``: fine-tune a language model so that it loses less in FP8."""

from pathlib import Path
from typing import Annotated

import typer

from octavo import recipes
from octavo.cli import options
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.progress import open_display, phases
from octavo.errors import ConfigError
from octavo.files import claimed_folder
from octavo.language_model import load_language_model
from octavo.quantization.qat.folder import save_qat
from octavo.quantization.qat.run import QATResult, QATSettings, run_qat
from octavo.quantization.qat.tuning import TuneSettings
from octavo.quantization.windows import text_windows
from octavo.recipes.specs import check_member
from octavo.training.config import Device
from octavo.training.corpus import Split
from octavo.training.precision import resolve_device
from octavo.training.text import BUILTIN

__all__ = ["qat"]

DEFAULTS = TuneSettings()
WORDS = {
    "bf16": "BF16, as it came",
    "fp8": "FP8 of it, not trained for it",
    "bf16-tuned": "BF16, tuned",
    "fp8-of-tuned": "FP8 of it, not trained for it",
    "fp8-qat": "FP8, trained for it",
}


def qat(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a Hugging Face folder, or a .gguf file.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write; new or empty.")],
    source: options.Source = None,
    recipe: Annotated[str, typer.Option(help="static, or a preset with dynamic scales.")] = "static",
    scales: Annotated[
        str | None, typer.Option(help="Scales of static inputs: tracked, learned or frozen. [default: tracked]")
    ] = None,
    clip_gradients: Annotated[
        bool, typer.Option("--clip-gradients", help="Give values that saturate the gradient zero.")
    ] = False,
    skip: Annotated[
        list[str] | None, typer.Option(help="Leave layers in BF16 whose path fits the pattern; may be repeated.")
    ] = None,
    convert_head: Annotated[bool, typer.Option("--convert-head", help="Quantise the head too.")] = False,
    steps: Annotated[int, typer.Option(help="Optimizer updates.")] = DEFAULTS.steps,
    batch_size: Annotated[int, typer.Option(help="Windows of an update.")] = DEFAULTS.batch_size,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = DEFAULTS.context,
    learning_rate: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = DEFAULTS.learning_rate,
    warmup: Annotated[int, typer.Option(help="Updates until the peak learning rate.")] = DEFAULTS.warmup,
    freeze_share: Annotated[
        float, typer.Option(help="Share of the steps, at the end, in which scales stay what they are.")
    ] = DEFAULTS.freeze_share,
    distill: Annotated[
        float, typer.Option(help="Weight of the divergence from the BF16 model's logits, 0 to 1.")
    ] = DEFAULTS.distill,
    temperature: Annotated[float, typer.Option(help="Temperature of that divergence.")] = DEFAULTS.temperature,
    baseline: Annotated[bool, typer.Option("--baseline", help="Tune a BF16 model too, on the same batches.")] = False,
    eval_windows: Annotated[int, typer.Option(help="Held-out windows to measure on.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the windows and their order.")] = DEFAULTS.seed,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Fine-tune a language model for FP8, and measure it beside one that was not."""
    settings = QATSettings(
        recipe=recipes.get(recipe),
        scales=_scales(recipe, scales),
        clip_gradients=clip_gradients,
        skip=tuple(skip or ()),
        convert_head=convert_head,
        baseline=baseline,
        tuning=TuneSettings(
            steps=steps,
            batch_size=batch_size,
            context=context,
            learning_rate=learning_rate,
            warmup=warmup,
            freeze_share=freeze_share,
            distill=distill,
            temperature=temperature,
            seed=seed,
        ),
    )
    target = resolve_device(_device(device))
    with claimed_folder(out), open_display() as display:
        show = phases(display)
        show("read the model", 0, 1)
        loaded = load_language_model(model)
        loaded.model.to(target)
        show("read the text", 0, 1)
        text = BUILTIN if source is None else source
        training = text_windows(loaded, text, Split.TRAIN, count=settings.tuning.windows, length=context, seed=seed)
        held_out = text_windows(loaded, text, Split.TEST, count=eval_windows, length=context, seed=seed)
        result = run_qat(loaded, settings, training=training, held_out=held_out, on_phase=show)
        show("write", 0, 1)
        save_qat(out, result)
    _show(result, out, as_json=as_json)


def _scales(recipe: str, given: str | None) -> str:
    if given is not None and not recipes.get(recipe).has_static_input:
        raise ConfigError(f"recipe {recipe!r} takes each scale from its own tensor; leave --scales out, or use static")
    return given or "tracked"


def _device(given: str | None) -> Device:
    check_member("device", given or Device.AUTO, tuple(Device))
    return Device(given or Device.AUTO)


def _show(result: QATResult, out: Path, *, as_json: bool) -> None:
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
        print_json({"out": str(out), "reference": result.reference, "measured": record})
        return
    rows = [(WORDS[name], number(found["perplexity"], 5), *_difference(found)) for name, found in record.items()]
    windows = len(next(iter(result.windows.values())))
    print_table(
        f"Held-out perplexity of {windows} windows, against {WORDS[result.reference]}",
        ["", "perplexity", "difference", "nats", "± standard error"],
        rows,
    )
    stdout().print(f"written to {out}; octavo.quantization.load_qat reads it", markup=False, soft_wrap=True)


def _difference(found: dict[str, float | None]) -> tuple[str, str, str]:
    if found["nats_above_reference"] is None:
        return ("", "", "")
    return (
        f"{found['percent_above_reference']:+.2f} %",
        f"{found['nats_above_reference']:+.4f}",
        f"{found['standard_error']:.4f}",
    )
