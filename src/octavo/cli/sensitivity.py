"""``octavo sensitivity MODEL``: cost of each layer in FP8, and the mix of precisions that meets a budget."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from octavo import recipes
from octavo.checkpoints import FORMATS
from octavo.checkpoints.contents import FP8Layer
from octavo.checkpoints.schemes import scheme_of
from octavo.cli import options
from octavo.cli.console import print_json, print_lines, print_table, stdout
from octavo.cli.progress import open_display, phases
from octavo.cli.result_saving import folder_to_fill, save_or_keep
from octavo.cli.training_text import text_to_train_on
from octavo.convert import left_as_they_are, unfuse_experts
from octavo.errors import ConfigError, DataError
from octavo.export.sources import OWN
from octavo.files import check_folder, check_room, write_atomically
from octavo.formats import E4M3
from octavo.language_model import load_language_model
from octavo.models.sources import located
from octavo.numerics import quantize
from octavo.numerics.cast_spec import check_member
from octavo.parsing import read_object
from octavo.quantization import text_windows
from octavo.quantization.sensitivity.mix import save_mix
from octavo.quantization.sensitivity.study import Budget, MixResult, Sensitivity, measure_sensitivity
from octavo.quantization.sensitivity.summary import FORMAT, cost_of, headline, name_of, notes, record, worst_first
from octavo.quantization.sensitivity.units import BF16, CHOICES, Unit
from octavo.reports.rendering import check_report_extra, write_page
from octavo.reports.sensitivity import sensitivity_page
from octavo.text.overlap import MOST_SHARED, shared_share
from octavo.training.config import MOST_SEED

__all__ = ["show_sensitivity"]

RECORD, MIX, PAGE = "sensitivity.json", "mix.toml", "report.html"
DEFAULT_PERPLEXITY = "1%"
NO_MIX = 1  # exit code
BYTES = 6 << 20  # of the files: plotly's script and less than one MiB of content
WORST = 15  # layers of the printed table


def show_sensitivity(
    *,
    source_of_model: options.Model,
    out: Annotated[Path, typer.Option(help="Folder for mix.toml, sensitivity.json and report.html.")],
    source: options.ModelText = None,
    split: Annotated[str, typer.Option(help="Split to choose on: train, validation, test or all.")] = "train",
    windows: Annotated[int, typer.Option(help="Windows to choose on, 2 or more.")] = 8,
    verify_source: Annotated[
        str | None, typer.Option("--verify-data", help="Text to verify on. [default: that of --data]")
    ] = None,
    verify_split: Annotated[str, typer.Option(help="Its split: train, validation, test or all.")] = "test",
    verify_windows: Annotated[int, typer.Option(help="Windows to verify on, 2 or more.")] = 8,
    context: Annotated[
        int | None, typer.Option(help="Tokens per window. [default: 512, or the model's context]")
    ] = None,
    budget_perplexity: Annotated[
        str | None,
        typer.Option(help="Largest increase of perplexity, such as 0.5%. [default: 1%; any with --budget-bytes]"),
    ] = None,
    budget_bytes: Annotated[
        str | None, typer.Option(help="Largest fraction of BF16's bytes, such as 0.60. [default: any]")
    ] = None,
    fmt: Annotated[str, typer.Option("--format", help=f"Format that shall hold the mix: {', '.join(FORMATS)}.")] = OWN,
    pairs: Annotated[int, typer.Option(help="Pairs of a layer and a format to measure, besides estimating all.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the windows and of the estimate.")] = 0,
    device: options.Device = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Rank a language model's layers by what FP8 costs them, and find the best mix of precisions for a budget.

    The exit code is 1 if no mix meets the budget, or the best one exceeds it on the verification windows.
    """
    place = options.device_of(device)
    budget, choices = _budget(budget_perplexity, budget_bytes), _choices_of(fmt)
    _check_numbers(windows=windows, verify_windows=verify_windows, pairs=pairs, seed=seed)
    if hub:
        located(source_of_model, hub=True)
    text = text_to_train_on(source_of_model) if source is None else source
    other = text if verify_source is None else verify_source
    _check_apart((text, split), (other, verify_split))
    check_folder(out, is_own=_is_sensitivity_folder)
    check_report_extra(PAGE)  # checked before the work
    check_room(out, BYTES)
    model = load_language_model(source_of_model, device=place)
    unfuse_experts(model.model)
    length = min(512, model.context) if context is None else context
    chosen_on = text_windows(model, text, split, count=windows, length=length, seed=seed)
    verified_on = text_windows(model, other, verify_split, count=verify_windows, length=length, seed=seed)
    with open_display() as display:
        sensitivity = measure_sensitivity(
            model.model,
            chosen_on,
            verified_on,
            budget=budget,
            **_held(model.model, choices, fmt),
            true_pairs=pairs,
            seed=seed,
            on_progress=phases(display),
        )
    facts = {
        "model": source_of_model,
        "chosen on": f"{text}, {split} split, {windows} windows of {length} tokens",
        "verified on": f"{other}, {verify_split} split, {verify_windows} windows of {length} tokens",
        **({} if fmt == OWN else {"for the format": fmt}),
    }
    if left := left_as_they_are(model.model):
        facts["left"] = left
    results = record(sensitivity, facts)
    folder, save_error = save_or_keep(
        out, lambda folder: _save(folder, sensitivity, results, facts), command="sensitivity", nbytes=BYTES
    )
    _show(sensitivity, results, folder, as_json=as_json)
    if save_error is not None:
        raise save_error
    if not sensitivity.is_met:
        raise typer.Exit(NO_MIX)


def _choices_of(fmt: str) -> list[str]:
    """Precisions that a format can hold, besides BF16.

    Raises:
        ConfigError: an unknown format, or one without any of them.
    """
    check_member("--format", fmt, tuple(FORMATS))
    schemes = FORMATS[fmt].schemes
    held = [one for one in CHOICES[:-1] if schemes is None or scheme_of(recipes.get(one)) in schemes]
    if not held:
        able = [name for name in FORMATS if name != fmt]
        raise ConfigError(f"{fmt} holds static scales alone, of octavo calibrate; a mix is for {', '.join(able)}")
    return held


def _held(model: nn.Module, choices: list[str], fmt: str) -> dict[str, Any]:
    """Settings of the search that a format and its readers allow."""
    is_own = FORMATS[fmt].schemes is None
    return {"choices": [one for one in choices if _fits(model, one, fmt)], "tables": is_own, "merged": not is_own}


def _fits(model: nn.Module, choice: str, fmt: str) -> bool:
    """Whether a format can hold layers of this model's widths with this recipe."""
    widths = {layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)}
    rows = (FP8Layer(recipe=recipes.get(choice), weight=quantize(torch.zeros(1, width), E4M3)) for width in widths)
    return all(FORMATS[fmt].refuses(row) is None for row in rows)


def _budget(perplexity: str | None, bytes_share: str | None) -> Budget:
    if perplexity is None and bytes_share is None:
        perplexity = DEFAULT_PERPLEXITY
    return Budget(
        perplexity=_share("--budget-perplexity", perplexity), bytes_share=_share("--budget-bytes", bytes_share)
    )


def _share(option: str, text: str | None) -> float | None:
    """Parse a share, in percent or as a number below 1; a bare 1 is ambiguous and rejected."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1 or (value == 1 and not text.endswith("%")):
        raise ConfigError(
            f"{option} takes a share: percent from above 0% to 100%, such as 1.0%, or a number between 0 and 1, such "
            f"as 0.01, not {text!r}"
        )
    return value


def _check_numbers(*, windows: int, verify_windows: int, pairs: int, seed: int) -> None:
    least = {"--windows": (windows, 2), "--verify-windows": (verify_windows, 2), "--pairs": (pairs, 0)}
    for option, (value, lowest) in least.items():
        if value < lowest:
            raise ConfigError(f"{option} must be at least {lowest}, not {value}")
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be from 0 to {MOST_SEED}, not {seed}")


def _check_apart(chosen: tuple[str, str], verified: tuple[str, str]) -> None:
    """Raise ConfigError if the text to verify on overlaps the text to choose on."""
    share = shared_share(chosen, verified)
    if share > MOST_SHARED:
        raise ConfigError(
            f"the mix would be verified on text it was chosen on: {share:.0%} of {verified[0]}, {verified[1]} is in "
            f"{chosen[0]}, {chosen[1]}; name another --verify-split or --verify-data"
        )


def _is_sensitivity_folder(out: Path) -> bool:
    """Return True for a folder that this command wrote."""
    try:
        return read_object(out / RECORD).get("format") == FORMAT
    except (OSError, DataError):
        return False


def _files(sensitivity: Sensitivity) -> list[str]:
    return [RECORD, PAGE] if sensitivity.mix is None else [MIX, RECORD, PAGE]


def _save(out: Path, sensitivity: Sensitivity, results: dict[str, Any], facts: dict[str, str]) -> None:
    """Write the record first, which marks the folder as this command's; remove an older mix if there is none now."""
    page = sensitivity_page(sensitivity, facts)
    with folder_to_fill(out) as folder:
        write_atomically(folder / RECORD, json.dumps(results, indent=1, allow_nan=False) + "\n")
        write_page(folder / PAGE, page)
        if sensitivity.mix is None:
            (folder / MIX).unlink(missing_ok=True)
        else:
            lines = [headline(sensitivity), *(f"{name}: {value}" for name, value in facts.items())]
            save_mix(sensitivity.mix, folder / MIX, comment="\n".join(lines))


def _show(sensitivity: Sensitivity, results: dict[str, Any], folder: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json(results)
        return
    _print(sensitivity)
    if "left" in results:
        print_lines(f"{results['left']}.")
    if folder is not None:
        print_lines(f"\nIn {folder}: {', '.join(_files(sensitivity))}")


def _print(sensitivity: Sensitivity) -> None:
    title = "What layers cost alone, in thousandths of a nat (worst first)"
    print_table(
        title,
        ["layer", *CHOICES[:-1], "the mix"],
        [_layer_cells(sensitivity, unit) for unit in worst_first(sensitivity)[:WORST]],
    )
    if len(sensitivity.units) > WORST:
        stdout().print(f"and {len(sensitivity.units) - WORST} more in {RECORD}\n")
    mixes = [] if sensitivity.best is None else [sensitivity.best]
    columns = ["mix", "bytes / BF16", "FP8 products", "perplexity", "nats", "KL"]
    print_table(
        "Verified on other text",
        columns,
        [_mix_cells(mix) for mix in (*mixes, *sensitivity.front, *sensitivity.presets)],
    )
    print_lines(*(f"{headline(sensitivity)}.", *notes(sensitivity)))


def _layer_cells(sensitivity: Sensitivity, unit: Unit) -> list[str]:
    costs = (cost_of(sensitivity, unit, choice) for choice in CHOICES[:-1])
    choice_in_mix = BF16 if sensitivity.best is None else sensitivity.best.chosen[unit.path]
    return [unit.path, *("–" if nats is None else f"{1000 * nats:.3f}" for nats in costs), choice_in_mix]


def _mix_cells(mix: MixResult) -> list[str]:
    verified = mix.verified
    if verified is None:
        return [name_of(mix), f"{mix.bytes_share:.3f}", f"{mix.fp8_products:.0%}", "–", "–", "–"]
    increase, nats = f"{verified.perplexity_increase:+.2%}", f"{verified.nats:+.4f} ± {verified.error:.4f}"
    return [
        name_of(mix),
        f"{mix.bytes_share:.3f}",
        f"{mix.fp8_products:.0%}",
        increase,
        nats,
        f"{verified.divergence:.4f}",
    ]
