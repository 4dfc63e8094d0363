"""``octavo calibrate``: static FP8 scales for a model, from sample text or from its delayed-scaling run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from octavo.cli import options
from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.progress import Display, open_display, phases
from octavo.cli.training_text import text_to_train_on
from octavo.convert import unfuse_experts
from octavo.errors import ConfigError
from octavo.formats import E4M3
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
from octavo.quantization.calibration.expert_scales import MIN_TOKENS
from octavo.quantization.calibration.folder import check_own_folder
from octavo.quantization.calibration.ranges import PERCENTILE, Method
from octavo.text.corpus import Split
from octavo.text.overlap import MOST_SHARED, shared_share
from octavo.text.sources import unseen_split

__all__ = ["calibrate"]

LONGEST, SAMPLES, CHECK_SAMPLES, ROWS = 512, 128, 32, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWindows:
    """Windows of a text source; a ``context`` of None is 512 tokens, or the model's context if shorter."""

    source: str
    split: str
    samples: int
    context: int | None
    seed: int = 0


def calibrate(
    *,
    model: options.Model,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the scales; replaces an older calibration.")],
    source: options.ModelText = None,
    split: Annotated[str | None, typer.Option(help="train, validation, test or all. [default: train]")] = None,
    samples: Annotated[int | None, typer.Option(help=f"Windows of text, evenly spread. [default: {SAMPLES}]")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens per window. [default: 512, or the model's context]")
    ] = None,
    seed: options.WindowSeed = None,
    method: Annotated[str, typer.Option(help="Range of inputs: max, percentile, mse or entropy.")] = "max",
    percentile: Annotated[float | None, typer.Option(help=f"For --method percentile. [default: {PERCENTILE}]")] = None,
    granularity: Annotated[str, typer.Option(help="Weight scales per tensor, row or 128x128 block.")] = "tensor",
    weights: Annotated[str, typer.Option(help="Range of weights: max or mse.")] = "max",
    power_of_two: Annotated[bool, typer.Option("--power-of-two", help="Round scales up to powers of two.")] = False,
    kv_cache: Annotated[
        bool, typer.Option("--kv-cache", help="Also find scales of keys and values, and means of keys.")
    ] = False,
    min_expert_tokens: Annotated[
        int | None,
        typer.Option(min=0, help=f"Fewest tokens of an expert for scales of its own. [default: {MIN_TOKENS}]"),
    ] = None,
    skip: options.Skip = None,
    head: options.Head = False,
    from_run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Take the amaxes that this delayed run recorded, instead of text."),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help=f"Report what saturates in {CHECK_SAMPLES} windows of this text (as --data; its test split if it is "
            "the calibration text).",
        ),
    ] = None,
    device: options.Device = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Find static FP8 scales for a model's linear layers and write them to a folder."""
    text_options: dict[str, object] = {"--data": source, "--split": split, "--samples": samples, "--seed": seed}
    _check_method(method, percentile, granularity, weights)
    if from_run is not None:
        text_options |= {"--method": method if method != Method.MAX else None, "--context": None if check else context}
        text_options |= {"--kv-cache": kv_cache or None, "--min-expert-tokens": min_expert_tokens}
        text_options |= {"--skip": skip, "--head": head or None}
        options.refuse_given(
            text_options, "--from-run takes amaxes from the run and cannot be combined with {}; leave one of them out"
        )
    target_device = options.device_of(device)
    check_own_folder(out)
    if hub:
        located(model, hub=True)
    text = TextWindows(
        source=text_to_train_on(from_run or model) if source is None else source,
        split=Split.TRAIN if split is None else split,
        samples=SAMPLES if samples is None else samples,
        context=context,
        seed=seed or 0,
    )
    check_text = None if check is None else _check_text(check, text)
    settings: dict[str, Any] = {"granularity": granularity, "weight_method": weights, "power_of_two": power_of_two}
    with open_display() as display:
        display.phase("load", None)
        loaded = load_language_model(model, device=target_device)
        unfuse_experts(loaded.model)
        # Before the calibration, which is long: a text too short for the check must not lose it.
        check_batches = None if check_text is None else _windows(loaded, check_text, display)
        if from_run is not None:
            calibration = calibration_from_run(from_run, **settings)
            calibration.check_fit(loaded.model)
        else:
            settings |= {"method": method, "kv_cache": kv_cache, "skip": skip or (), "convert_head": head}
            settings["percentile"] = PERCENTILE if percentile is None else percentile
            settings["min_expert_tokens"] = MIN_TOKENS if min_expert_tokens is None else min_expert_tokens
            calibration = _from_text(loaded, text, display, settings)
        check_coverage = (
            None if check_batches is None else _measure_coverage(loaded, calibration, check_batches, display)
        )
    calibration.save(out)
    if as_json:
        print_json(_record(calibration, check_coverage, out))
    else:
        _print(calibration, check_coverage, out)


def _check_method(method: str, percentile: float | None, granularity: str, weights: str) -> None:
    """Refuse choices that do not exist, and a percentile that nothing uses, before a model is read."""
    share = PERCENTILE if percentile is None else percentile
    check_choices(method=method, percentile=share, granularity=granularity, weight_method=weights)
    if percentile is not None and method != Method.PERCENTILE:
        raise ConfigError(f"--percentile {percentile} needs --method percentile; add that, or leave --percentile out")


def _check_text(source: str, calibrated: TextWindows) -> TextWindows:
    """Return the text to check the scales on.

    Raises:
    ConfigError: more than half of it is text that the scales were calibrated on.
    """
    split = unseen_split(source, calibrated.source)
    share = shared_share((calibrated.source, calibrated.split), (source, split))
    if share > MOST_SHARED:
        raise ConfigError(
            f"--check needs text that the scales were not calibrated on, but {share:.0%} of {source}, {split} is in "
            f"{calibrated.source}, {calibrated.split}; check other text, or calibrate on a split without it"
        )
    return TextWindows(source=source, split=split, samples=CHECK_SAMPLES, context=calibrated.context)


def _from_text(model: LanguageModel, text: TextWindows, display: Display, settings: dict[str, Any]) -> Calibration:
    batches = _windows(model, text, display)
    show = phases(display)
    settings |= {"source": text.source, "split": text.split}
    return find_scales(model, batches, on_batch=lambda done, total: show("calibrate", done, total or 0), **settings)


def _measure_coverage(
    model: LanguageModel, calibration: Calibration, batches: tuple[Tensor, ...], display: Display
) -> tuple[LayerCoverage, ...]:
    show = phases(display)
    return coverage(model, calibration, batches, on_batch=lambda done, total: show("check", done, total or 0))


def _windows(model: LanguageModel, text: TextWindows, display: Display) -> tuple[Tensor, ...]:
    """Return the windows as batches of one."""
    display.phase("read text", None)
    length = min(LONGEST, model.context) if text.context is None else text.context
    windows = text_windows(model, text.source, text.split, count=text.samples, length=length, seed=text.seed)
    return windows.split(1)  # type: ignore[no-any-return]


def _record(calibration: Calibration, check_coverage: Sequence[LayerCoverage] | None, out: Path) -> dict[str, Any]:
    checked = None if check_coverage is None else [asdict(each) for each in check_coverage]
    keys_and_values = {layer: [float(scale) for scale in pair] for layer, pair in calibration.kv_scales.items()}
    return {"out": str(out), **calibration.to_record(), "kv_cache": keys_and_values, "check": checked}


def _print(calibration: Calibration, check_coverage: Sequence[LayerCoverage] | None, out: Path) -> None:
    sentences = [
        *_clipping_notes(calibration),
        *(f"warning: {sentence}" for sentence in calibration.warnings()),
        *_coverage_lines(check_coverage),
    ]
    rows, inputs = _rows(calibration, sentences)
    shown = "" if len(rows) == inputs else f", the {ROWS} of lowest SQNR among {inputs} inputs, and those named below"
    columns = ["input of", "amax", "scale", "SQNR dB", "to zero", "clipped", "amax/rms", "moved", "weight dB"]
    print_table(f"Inputs and their scales{shown}", columns, rows)
    if calibration.kv_scales:
        print_table(
            "Keys and values", ["layer", "scale of keys", "up to", "scale of values", "up to"], _kv_rows(calibration)
        )
    print_lines(
        *sentences,
        f"{out}: scales of {len(calibration.input_scales)} layers; use it with octavo export … --calibration {out}, or "
        "octavo.load_calibration",
    )


def _rows(calibration: Calibration, sentences: Sequence[str]) -> tuple[list[list[str]], int]:
    """Rows of the inputs of lowest SQNR and of those that a sentence names, and the number of all inputs.

    Layers that share an input share a row.
    """
    sharing = {group[0]: group[1:] for group in calibration.groups}
    followers = {path for group in sharing.values() for path in group}
    inputs = [each for each in calibration.health if each.path not in followers]
    inputs.sort(key=lambda each: float("inf") if each.sqnr_db is None else each.sqnr_db)

    def is_named(path: str) -> bool:
        return any(repr(each) in sentence for each in (path, *sharing.get(path, ())) for sentence in sentences)

    shown = [each for index, each in enumerate(inputs) if index < ROWS or is_named(each.path)]
    return [_cells(each, len(sharing.get(each.path, ()))) for each in shown], len(inputs)


def _kv_rows(calibration: Calibration) -> list[list[str]]:
    """One row per decoder layer: each scale, and the largest number that E4M3 holds with it."""
    return [
        [str(layer), *(number(value, 4) for scale in map(float, pair) for value in (scale, scale * E4M3.max))]
        for layer, pair in sorted(calibration.kv_scales.items())
    ]


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


def _clipping_notes(calibration: Calibration) -> Iterator[str]:
    """Sentence about the elements that the method clips, if there are any."""
    worst = max(calibration.health, key=lambda each: each.clipped_fraction or 0.0)
    if worst.clipped_fraction:
        yield (
            f"{calibration.rule.method} clips up to {_percent(worst.clipped_fraction)} of an input's elements, with "
            f"{_percent(worst.clipped_energy)} of its energy ({worst.path})"
        )


def _coverage_lines(check_coverage: Sequence[LayerCoverage] | None) -> Iterator[str]:
    if check_coverage is None:
        return
    outside = [each for each in check_coverage if each.goes_beyond]
    if not outside:
        most = max(each.saturation_fraction for each in check_coverage)
        yield f"the checked text fits the scales: at most {_percent(most)} of an input's elements saturate"
        return
    worst = outside[0]
    yield (
        f"warning: the checked text exceeds the scales of {len(outside)} tensors, most in {worst.path!r}: amax "
        f"{worst.ratio:.2f} times what its scale covers, {_percent(worst.saturation_fraction)} saturated; "
        "calibrate on text of this kind"
    )


def _percent(share: float | None) -> str:
    return number(None) if share is None else "0" if share == 0 else f"{100 * share:.2g} %"


def _decibels(value: float | None) -> str:
    return number(None) if value is None else f"{value:.1f}"
