"""``octavo sensitivity MODEL``: what each layer costs in FP8, and the mix of precisions that meets a budget."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options
from octavo.cli.console import print_json, print_lines, print_table, stdout
from octavo.cli.progress import open_display, phases
from octavo.cli.result_saving import save_or_keep
from octavo.cli.training_text import text_to_train_on
from octavo.errors import ConfigError, DataError
from octavo.files import check_folder, check_room, replacing_folder, write_atomically
from octavo.language_model import load_language_model
from octavo.models.sources import located
from octavo.parsing import read_object
from octavo.quantization import text_windows
from octavo.quantization.sensitivity import Budget, Found, Sensitivity, measure_sensitivity, save_mix
from octavo.quantization.sensitivity.summary import FORMAT, cost_of, headline, name_of, notes, record, worst_first
from octavo.quantization.sensitivity.units import BF16, CHOICES, Unit
from octavo.reports.rendering import check_report_extra
from octavo.reports.sensitivity import sensitivity_page
from octavo.text.overlap import MOST_SHARED, shared_share
from octavo.training.config import MOST_SEED

__all__ = ["show_sensitivity"]

RECORD, MIX, PAGE = "sensitivity.json", "mix.toml", "report.html"
DEFAULT_PERPLEXITY = "1%"
NO_MIX = 1  # exit code
BYTES = 6 << 20  # of the files: plotly's script, and less than one MiB
WORST = 15  # layers of the printed table


def show_sensitivity(
    *,
    source_of_model: options.Model,
    out: Annotated[Path, typer.Option(help="Folder for mix.toml, sensitivity.json and report.html.")],
    source: options.ModelText = None,
    split: Annotated[str, typer.Option(help="What to choose on: train, validation, test or all.")] = "train",
    windows: Annotated[int, typer.Option(help="Windows to choose on, 2 or more.")] = 8,
    verify_source: Annotated[
        str | None, typer.Option("--verify-data", help="Text to verify on. [default: that of --data]")
    ] = None,
    verify_split: Annotated[str, typer.Option(help="What of it: train, validation, test or all.")] = "test",
    verify_windows: Annotated[int, typer.Option(help="Windows to verify on, 2 or more.")] = 8,
    context: Annotated[int | None, typer.Option(help="Tokens of a window. [default: 512, or what it reads]")] = None,
    budget_perplexity: Annotated[
        str | None,
        typer.Option(help="Most that perplexity may rise, such as 0.5%. [default: 1%, or with bytes any]"),
    ] = None,
    budget_bytes: Annotated[
        str | None, typer.Option(help="Most bytes over BF16's, such as 0.60. [default: any]")
    ] = None,
    pairs: Annotated[int, typer.Option(help="How many (layer, choice) to run for real, beside the estimates.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the windows and of the estimate.")] = 0,
    device: options.Device = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Rank a language model's layers by what FP8 costs them, and find the best mix of precisions for a budget.

    Exit code 1 says that no mix was found within it.
    """
    place = options.device_of(device)
    budget = _budget(budget_perplexity, budget_bytes)
    _check_numbers(windows=windows, verify_windows=verify_windows, pairs=pairs, seed=seed)
    if hub:
        located(source_of_model, hub=True)
    text = text_to_train_on(source_of_model) if source is None else source
    other = text if verify_source is None else verify_source
    _check_apart((text, split), (other, verify_split))
    check_folder(out, is_own=_is_ours)
    check_report_extra(PAGE)  # refused now, and not after the work
    check_room(out, BYTES)
    model = load_language_model(source_of_model, device=place)
    length = min(512, model.context) if context is None else context
    chosen_on = text_windows(model, text, split, count=windows, length=length, seed=seed)
    verified_on = text_windows(model, other, verify_split, count=verify_windows, length=length, seed=seed)
    with open_display() as display:
        found = measure_sensitivity(
            model.model,
            chosen_on,
            verified_on,
            budget=budget,
            true_pairs=pairs,
            seed=seed,
            on_progress=phases(display),
        )
    facts = {
        "model": source_of_model,
        "chosen on": f"{text}, {split} split, {windows} windows of {length} tokens",
        "verified on": f"{other}, {verify_split} split, {verify_windows} windows of {length} tokens",
    }
    kept = record(found, facts)
    folder, refused = save_or_keep(
        out, lambda folder: _save(folder, found, kept, facts), command="sensitivity", nbytes=BYTES
    )
    _show(found, kept, folder, as_json=as_json)
    if refused is not None:
        raise refused
    if found.best is None:
        raise typer.Exit(NO_MIX)


def _budget(perplexity: str | None, bytes_share: str | None) -> Budget:
    if perplexity is None and bytes_share is None:
        perplexity = DEFAULT_PERPLEXITY
    return Budget(
        perplexity=_share("--budget-perplexity", perplexity), bytes_share=_share("--budget-bytes", bytes_share)
    )


def _share(option: str, text: str | None) -> float | None:
    """A share, from percent or as a number below 1: a bare 1 may be meant as either."""
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
    """Refuse to verify on what was chosen on, under whatever name."""
    share = shared_share(chosen, verified)
    if share > MOST_SHARED:
        raise ConfigError(
            f"the mix would be verified on text it was chosen on: {share:.0%} of {verified[0]}, {verified[1]} is in "
            f"{chosen[0]}, {chosen[1]}; name another --verify-split or --verify-data"
        )


def _is_ours(out: Path) -> bool:
    """Whether a folder is one that this command wrote."""
    try:
        return read_object(out / RECORD).get("format") == FORMAT
    except (OSError, DataError):
        return False


def _files(found: Sensitivity) -> list[str]:
    return [RECORD, PAGE] if found.mix is None else [MIX, RECORD, PAGE]


def _save(out: Path, found: Sensitivity, kept: dict[str, Any], facts: dict[str, str]) -> None:
    """Write a new folder as a whole; in one of before, file by file, beside what else is in it."""
    if out.exists():
        _write(out, found, kept, facts)
        return
    with replacing_folder(out) as temporary:
        _write(temporary, found, kept, facts)


def _write(out: Path, found: Sensitivity, kept: dict[str, Any], facts: dict[str, str]) -> None:
    """The record first: it marks the folder as this command's. A mix of before that no longer holds goes."""
    page = sensitivity_page(found, facts)
    write_atomically(out / RECORD, json.dumps(kept, indent=1, allow_nan=False) + "\n")
    write_atomically(out / PAGE, page)
    if found.mix is None:
        (out / MIX).unlink(missing_ok=True)
    else:
        lines = [headline(found), *(f"{name}: {value}" for name, value in facts.items())]
        save_mix(found.mix, out / MIX, comment="\n".join(lines))


def _show(found: Sensitivity, kept: dict[str, Any], folder: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json(kept)
        return
    _print(found)
    if folder is not None:
        print_lines(f"\nIn {folder}: {', '.join(_files(found))}")


def _print(found: Sensitivity) -> None:
    title = "What layers cost alone, in thousandths of a nat (worst first)"
    print_table(
        title, ["layer", *CHOICES[:-1], "the mix"], [_layer(found, unit) for unit in worst_first(found)[:WORST]]
    )
    if len(found.units) > WORST:
        stdout().print(f"and {len(found.units) - WORST} more in {RECORD}\n")
    mixes = [] if found.best is None else [found.best]
    head = ["mix", "bytes / BF16", "FP8 products", "perplexity", "nats", "KL"]
    print_table("Verified on other text", head, [_mix(one) for one in (*mixes, *found.front, *found.presets)])
    print_lines(*(f"{headline(found)}.", *notes(found)))


def _layer(found: Sensitivity, unit: Unit) -> list[str]:
    costs = (cost_of(found, unit, choice) for choice in CHOICES[:-1])
    chosen = BF16 if found.best is None else found.best.chosen[unit.path]
    return [unit.path, *("–" if nats is None else f"{1000 * nats:.3f}" for nats in costs), chosen]


def _mix(one: Found) -> list[str]:
    true = one.verified
    if true is None:
        return [name_of(one), f"{one.bytes_share:.3f}", f"{one.fp8_products:.0%}", "–", "–", "–"]
    increase, nats = f"{true.perplexity_increase:+.2%}", f"{true.nats:+.4f} ± {true.error:.4f}"
    return [name_of(one), f"{one.bytes_share:.3f}", f"{one.fp8_products:.0%}", increase, nats, f"{true.divergence:.4f}"]
