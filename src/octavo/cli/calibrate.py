"""``octavo calibrate``: static FP8 scales for a model, from text it reads or from the run it was trained in."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from octavo.cli import options
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.progress import Display, open_display, phases
from octavo.cli.runs import text_to_train_on
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel, load_language_model
from octavo.models.sources import located
from octavo.quantization import (
    Calibration,
    LayerCoverage,
    LayerHealth,
    calibration_from_run,
    coverage,
    text_windows,
)
from octavo.quantization import calibrate as find_scales
from octavo.quantization.calibration.calibrate import check_choices
from octavo.quantization.calibration.folder import check_own_folder
from octavo.quantization.calibration.ranges import PERCENTILE, Method
from octavo.text.corpus import Split
from octavo.text.overlap import MOST_SHARED, shared_share
from octavo.text.sources import unseen_split

__all__ = ["calibrate"]

LONGEST, SAMPLES, CHECK_SAMPLES, ROWS = 512, 128, 32, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Which windows of which text, and how many tokens each; a context of None is 512, or what the model reads."""

    source: str
    split: str
    samples: int
    context: int | None
    seed: int = 0


def calibrate(
    *,
    model: options.Model,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the scales go; an older calibration is replaced.")],
    source: options.ModelText = None,
    split: Annotated[str | None, typer.Option(help="train, validation, test or all. [default: train]")] = None,
    samples: Annotated[int | None, typer.Option(help=f"Windows of text, spread over it. [default: {SAMPLES}]")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window. [default: 512, or what the model reads]")
    ] = None,
    seed: options.WindowSeed = None,
    method: Annotated[str, typer.Option(help="Ranges of inputs: max, percentile, mse or entropy.")] = "max",
    percentile: Annotated[float | None, typer.Option(help=f"Of the method percentile. [default: {PERCENTILE}]")] = None,
    granularity: Annotated[str, typer.Option(help="Scales of weights: tensor, row or 128x128.")] = "tensor",
    weights: Annotated[str, typer.Option(help="Ranges of weights: max or mse.")] = "max",
    power_of_two: Annotated[bool, typer.Option("--power-of-two", help="Round scales up to powers of two.")] = False,
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="Scales of keys and values, means of keys.")] = False,
    skip: options.Skip = None,
    head: options.Head = False,
    from_run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Take the amaxes that this delayed run has kept; reads no text.")
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="See what saturates on other text: as --data, all of it; of text calibrated on, its test split.",
        ),
    ] = None,
    device: options.Device = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Find static FP8 scales for a model's linear layers and write them to a folder."""
    of_text = {"--data": source, "--split": split, "--samples": samples, "--seed": seed}
    _check_method(method, percentile, granularity, weights)
    if from_run is not None:
        of_text |= {"--method": method if method != Method.MAX else None, "--context": None if check else context}
        _refuse_beside_run(of_text | {"--kv-cache": kv_cache or None, "--skip": skip, "--head": head or None})
    place = options.device_of(device)
    check_own_folder(out)
    if hub:
        located(model, hub=True)
    text = Text(
        source=text_to_train_on(from_run or model) if source is None else source,
        split=Split.TRAIN if split is None else split,
        samples=SAMPLES if samples is None else samples,
        context=context,
        seed=seed or 0,
    )
    other = None if check is None else _other_text(check, text)
    how: dict[str, Any] = {"granularity": granularity, "weight_method": weights, "power_of_two": power_of_two}
    with open_display() as display:
        display.phase("load", None)
        loaded = load_language_model(model, device=place)
        if from_run is not None:
            found = calibration_from_run(from_run, **how)
            found.check_fit(loaded.model)
        else:
            how |= {"method": method, "kv_cache": kv_cache, "skip": skip or (), "convert_head": head}
            how["percentile"] = PERCENTILE if percentile is None else percentile
            found = _from_text(loaded, text, display, how)
        beyond = None if other is None else _checked(loaded, found, other, display)
    found.save(out)
    if as_json:
        print_json(_record(found, beyond, out))
    else:
        _print(found, beyond, out)


def _check_method(method: str, percentile: float | None, granularity: str, weights: str) -> None:
    """Refuse choices that do not exist, and a percentile that nothing uses, before a model is read."""
    share = PERCENTILE if percentile is None else percentile
    check_choices(method=method, percentile=share, granularity=granularity, weight_method=weights)
    if percentile is not None and method != Method.PERCENTILE:
        raise ConfigError(f"--percentile {percentile} is of --method percentile; add that, or leave it out")


def _refuse_beside_run(given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"--from-run takes the amaxes that the run has kept, and no {option}; leave one of them out"
            )


def _other_text(source: str, calibrated: Text) -> Text:
    """Text to check the scales on, which is not what they were calibrated on.

    Raises:
        ConfigError: more than half of it is.
    """
    split = unseen_split(source, calibrated.source)
    share = shared_share((calibrated.source, calibrated.split), (source, split))
    if share > MOST_SHARED:
        raise ConfigError(
            f"the scales would be checked on text they come from: {share:.0%} of {source}, {split} is in "
            f"{calibrated.source}, {calibrated.split}; check other text, or calibrate on a split without it"
        )
    return Text(source=source, split=split, samples=CHECK_SAMPLES, context=calibrated.context)


def _from_text(model: LanguageModel, text: Text, display: Display, how: dict[str, Any]) -> Calibration:
    batches = _windows(model, text, display)
    show = phases(display)
    how |= {"source": text.source, "split": text.split}
    return find_scales(model, batches, on_batch=lambda done, total: show("calibrate", done, total or 0), **how)


def _checked(model: LanguageModel, found: Calibration, text: Text, display: Display) -> tuple[LayerCoverage, ...]:
    batches = _windows(model, text, display)
    show = phases(display)
    return coverage(model, found, batches, on_batch=lambda done, total: show("check", done, total or 0))


def _windows(model: LanguageModel, text: Text, display: Display) -> tuple[Tensor, ...]:
    """Batches of one window."""
    display.phase("read text", None)
    length = min(LONGEST, model.context) if text.context is None else text.context
    windows = text_windows(model, text.source, text.split, count=text.samples, length=length, seed=text.seed)
    return windows.split(1)  # type: ignore[no-any-return]


def _record(found: Calibration, beyond: Sequence[LayerCoverage] | None, out: Path) -> dict[str, Any]:
    checked = None if beyond is None else [asdict(each) for each in beyond]
    keys_and_values = {layer: [float(scale) for scale in pair] for layer, pair in found.kv_scales.items()}
    return {"out": str(out), **found.to_record(), "kv_cache": keys_and_values, "check": checked}


def _print(found: Calibration, beyond: Sequence[LayerCoverage] | None, out: Path) -> None:
    rows = _rows(found)
    shown = "" if len(rows) <= ROWS else f", the {ROWS} of lowest SQNR among {len(rows)} inputs"
    columns = ["input of", "amax", "scale", "SQNR dB", "to zero", "clipped", "amax/rms", "moved", "weight dB"]
    print_table(f"Inputs and their scales{shown}", columns, rows[:ROWS])
    lines = [_clipped(found), *(f"warning: {sentence}" for sentence in found.warnings())]
    lines += _lines_of_check(beyond)
    lines.append(f"{out} holds the scales of {len(found.input_scales)} layers; octavo.load_calibration reads it")
    stdout().print("\n".join(filter(None, lines)), markup=False, soft_wrap=True)


def _rows(found: Calibration) -> list[list[str]]:
    """A row an input, the lowest SQNR first; layers that share one stand together."""
    sharing = {group[0]: len(group) - 1 for group in found.groups}
    followers = {path for group in found.groups for path in group[1:]}
    inputs = [each for each in found.health if each.path not in followers]
    inputs.sort(key=lambda each: float("inf") if each.sqnr_db is None else each.sqnr_db)
    return [_cells(each, sharing.get(each.path, 0)) for each in inputs]


def _cells(layer: LayerHealth, others: int) -> list[str]:
    name = (layer.path or "the model") + (f" +{others}" if others else "")
    shares = [_percent(each) for each in (layer.underflow_fraction, layer.clipped_fraction)]
    return [
        name,
        *(number(each, 4) for each in (layer.amax, layer.scale)),
        _decibels(layer.sqnr_db),
        *shares,
        number(layer.peak, 3),
        _percent(layer.moved),
        _decibels(layer.weight_sqnr_db),
    ]


def _clipped(found: Calibration) -> str:
    """What the method clips, in a sentence; empty where it clips nothing."""
    worst = max(found.health, key=lambda each: each.clipped_fraction or 0.0)
    if not worst.clipped_fraction:
        return ""
    return (
        f"{found.rule.method} clips up to {_percent(worst.clipped_fraction)} of an input's elements, with "
        f"{_percent(worst.clipped_energy)} of its energy ({worst.path})"
    )


def _lines_of_check(beyond: Sequence[LayerCoverage] | None) -> Iterator[str]:
    if beyond is None:
        return
    outside = [each for each in beyond if each.goes_beyond]
    if not outside:
        most = max(each.saturation_fraction for each in beyond)
        yield f"the checked text fits the scales: {_percent(most)} of an input's elements saturate at most"
        return
    worst = outside[0]
    yield (
        f"warning: the checked text goes beyond the scales of {len(outside)} layers, most in {worst.path!r}: amax "
        f"{worst.ratio:.2f} times what its scale provides for, {_percent(worst.saturation_fraction)} saturated; "
        "calibrate on text of that kind"
    )


def _percent(share: float | None) -> str:
    return number(None) if share is None else "0" if share == 0 else f"{100 * share:.2g} %"


def _decibels(value: float | None) -> str:
    return number(None) if value is None else f"{value:.1f}"
