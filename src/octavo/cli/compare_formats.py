"""``octavo eval MODEL --compare …``: one model in several formats, compared with BF16."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.bench.latency import PassTime, pass_times, passes_note
from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.contamination import Readers, default_split, readers_of, shares_read, warnings_of
from octavo.cli.progress import Display, open_display, phases
from octavo.cli.training_text import own_source, text_to_train_on
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel, load_language_model
from octavo.quantization import calibrate, load_calibration, load_qat, text_windows
from octavo.quantization.comparison.comparison import FormatComparison, compare
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.quantization.comparison.kv_cache_round_trip import key_means
from octavo.quantization.comparison.variants import (
    AS_IT_IS,
    BF16,
    CENTRED,
    STATIC,
    TUNED,
    FormatVariant,
    StaticScales,
    as_it_is,
    check_formats,
    line_up,
)
from octavo.text.corpus import Split
from octavo.text.sources import TOPICS
from octavo.training.config import Device
from octavo.training.memory import extra_memory_bytes

__all__ = ["EvaluationRequest", "compare_formats", "evaluate_model", "evaluated_windows", "print_evaluation"]

WINDOWS, LENGTH, SAMPLES, MEAN_WINDOWS, SPEED_LENGTH = 40, 512, 128, 4, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Options of ``octavo eval`` for a model that is not evaluated as a run.

    Attributes:
        source: text source; None is the run's own, or Python's language reference for other models.
        split: split of the source; None is a run's test split, or all of the source.
        windows: number of windows to score.
        length: tokens per window; None is the model's context, at most 512.
        calibration: folder of ``octavo calibrate``; None calibrates now.
        samples: windows to calibrate with if ``calibration`` is None.
        tuned: folder of ``octavo qat``.
        speed: whether to time passes.
        device: device of the model.
    """

    model: str
    source: str | None = None
    split: str | None = None
    windows: int = WINDOWS
    length: int | None = None
    calibration: Path | None = None
    samples: int = SAMPLES
    tuned: Path | None = None
    speed: bool = False
    device: Device = Device.AUTO


def evaluate_model(request: EvaluationRequest, *, as_json: bool) -> None:
    """Print the loss of a model that is not a run: in FP32, or with the FP8 codes of its folder."""
    with open_display() as display:
        model = load_language_model(request.model, device=request.device)
        windows, text = evaluated_windows(model, request, readers_of(request.model))
        comparison = _compare(display, [as_it_is(model)], windows, reference=AS_IT_IS)
    entry = comparison.entry(AS_IT_IS)
    record = {
        "model": request.model,
        "format": f"FP8 codes in {entry.quantized} layers, as stored" if entry.quantized else "FP32",
        **text,
        "windows": comparison.windows,
        "context": comparison.length,
        "tokens": comparison.tokens,
        "nats": entry.scores.nats,
        "perplexity": entry.scores.perplexity,
    }
    print_evaluation(record, as_json=as_json)


def print_evaluation(record: dict[str, Any], *, as_json: bool) -> None:
    """Print the record of one evaluation, with warnings about text that was read before."""
    if as_json:
        print_json(record)
        return
    shares = record.pop("read_before", {})
    rows = [
        (name, number(value, 6) if isinstance(value, int | float) else str(value)) for name, value in record.items()
    ]
    print_table("Evaluation", ["", ""], rows)
    print_lines(*warnings_of(shares, record["data"], record["split"]))


def compare_formats(request: EvaluationRequest, names: Sequence[str], *, as_json: bool) -> None:
    """Print quality, size and optionally speed of a model in each format."""
    names = check_formats(names)
    _check_folders(request, names)
    with open_display() as display:
        model = load_language_model(request.model, device=request.device)
        windows, text = evaluated_windows(model, request, _readers(request, names))
        calibration, calibrated_on = _calibration(model, request, names, display)
        tuned = load_qat(request.tuned) if request.tuned is not None else None
        if tuned is not None:
            tuned.model.to(model.device)
        means = _means(model, request, display) if CENTRED in names else None
        show = display.phase("prepare formats", len(names))
        variants = line_up(
            model,
            names,
            calibration=calibration,
            tuned_model=tuned,
            means=means,
            advance=lambda done, _: show(done),
        )
        comparison = _compare(display, variants, windows)
        extra = _extra_memory(display, variants, windows)
        times = _time_passes(display, variants, windows) if request.speed else []
    facts = {"model": request.model, **text, **calibrated_on}
    if tuned is not None:
        facts["tuned"] = str(request.tuned)
    if as_json:
        print_json(_record(facts, comparison, extra, times, model.device))
        return
    _print(facts, comparison, extra, times, model.device)


def _readers(request: EvaluationRequest, names: Sequence[str]) -> Readers:
    calibrates = bool({STATIC, CENTRED} & {*names})
    return readers_of(request.model, calibrates=calibrates, calibration=request.calibration, tuned=request.tuned)


def evaluated_windows(
    model: LanguageModel, request: EvaluationRequest, readers: Readers
) -> tuple[Tensor, dict[str, Any]]:
    """Return the windows to score and a record of their source, split and contamination."""
    source = request.source or own_source(request.model) or TOPICS
    split = request.split or default_split(request.model, readers, source)
    windows = evaluation_windows(model, source, split, count=request.windows, length=_length(model, request))
    text = {"data": source, "split": split}
    return windows, text | ({"read_before": shares_read(readers, source, split)} if readers else {})


def _length(model: LanguageModel, request: EvaluationRequest) -> int:
    """Tokens of a window."""
    return min(LENGTH, model.context) if request.length is None else request.length


def _check_folders(request: EvaluationRequest, names: Sequence[str]) -> None:
    """Raise ConfigError for a folder that no format uses, or a format without its folder."""
    uses = (("--calibration", request.calibration, (STATIC, CENTRED)), ("--qat", request.tuned, (TUNED,)))
    for option, folder, users in uses:
        if folder is not None and not {*users} & {*names}:
            raise ConfigError(
                f"{option} is only used by {' and '.join(users)}; add it to --compare, or leave {option} out"
            )
    if TUNED in names and request.tuned is None:
        raise ConfigError(f"{TUNED} needs a folder of octavo qat; give it with --qat, or leave {TUNED} out")


def _calibration(
    model: LanguageModel, request: EvaluationRequest, names: Sequence[str], display: Display
) -> tuple[StaticScales | None, dict[str, Any]]:
    """Scales of fp8-static, from a folder or calibrated on text that is not evaluated."""
    if STATIC not in names:
        return None, {}
    if request.calibration is not None:
        return load_calibration(request.calibration), {"calibration": str(request.calibration)}
    batches = _training_windows(model, request, request.samples)
    advance = display.phase("calibrate", len(batches))
    source = text_to_train_on(request.model)
    calibration = calibrate(model, [window[None] for window in batches], on_batch=lambda done, _: advance(done))
    return calibration, {"calibration": f"{len(batches)} windows of {source}, train"}


def _means(model: LanguageModel, request: EvaluationRequest, display: Display) -> Mapping[int, Tensor]:
    """Means of keys, from a calibration or measured on calibration text."""
    if request.calibration is not None:
        return load_calibration(request.calibration).means_of_keys(model)
    display.phase("means of keys", None)
    return key_means(model, _training_windows(model, request, MEAN_WINDOWS))


def _training_windows(model: LanguageModel, request: EvaluationRequest, count: int) -> Tensor:
    """Windows of text that is not evaluated, of the same length."""
    source = text_to_train_on(request.model)
    return text_windows(model, source, str(Split.TRAIN), count=count, length=_length(model, request))


def _compare(
    display: Display, variants: Sequence[FormatVariant], windows: Tensor, reference: str = BF16
) -> FormatComparison:
    advance = display.phase("evaluate", len(windows) * len(variants))
    return compare(variants, windows, reference=reference, advance=lambda done, _: advance(done))


def _extra_memory(display: Display, variants: Sequence[FormatVariant], windows: Tensor) -> dict[str, int | None]:
    """Bytes that a pass over one window needs in addition to the weights, after every format has run once."""
    display.phase("memory of a pass", None)
    return {
        variant.name: extra_memory_bytes(windows.device, partial(variant.logits, windows[:1])) for variant in variants
    }


def _time_passes(display: Display, variants: Sequence[FormatVariant], windows: Tensor) -> list[PassTime]:
    show = phases(display)
    return pass_times(
        {variant.name: variant for variant in variants},
        windows[0, :SPEED_LENGTH],
        advance=lambda done, total: show("time passes", done, total),
    )


QUALITY = ["format", "perplexity", "vs BF16", "nats more", "top-1", "KL"]
SIZES = ["format", "layers in it", "file, MB", "of BF16's", "memory, MB", "peak, MB"]


def _print(
    facts: dict[str, Any],
    comparison: FormatComparison,
    extra: Mapping[str, int | None],
    times: Sequence[PassTime],
    device: torch.device,
) -> None:
    """Print tables that fit a terminal of 80 columns."""
    names = [entry.name for entry in comparison.entries]
    print_table(f"{facts['model']} on {facts['data']}", QUALITY, [_quality(comparison, name) for name in names])
    print_lines(*_notes(facts, comparison))
    print_table("Weights", SIZES, [_sizes(comparison, name, extra[name]) for name in names])
    print_lines(_peak_note(comparison, device))
    if times:
        columns = [word for batch in sorted({time.batch for time in times}) for word in (f"ms at {batch}", "tokens/s")]
        title = f"A pass over {times[0].length} tokens per sequence, by batch size"
        print_table(title, ["format", *columns], [[name, *_times(times, name)] for name in names])
        print_lines(passes_note(device))


def _quality(comparison: FormatComparison, name: str) -> list[str]:
    scores, gap = comparison.entry(name).scores, comparison.gap(name)
    if name == comparison.reference:
        return [name, f"{scores.perplexity:.4f}", *[""] * 4]
    return [
        name,
        f"{scores.perplexity:.4f}",
        f"{gap.percent:+.2f} %",
        f"{gap.nats:+.4f} ± {gap.standard_error:.4f}",
        f"{scores.agreement:.2%}",
        f"{scores.divergence:.5f}",
    ]


def _sizes(comparison: FormatComparison, name: str, extra: int | None) -> list[str]:
    entry = comparison.entry(name)
    sizes = (entry.storage.file_bytes, entry.storage.memory_bytes, _peak(comparison, name, extra))
    file, *in_memory = ("–" if size is None else f"{size / 1e6:,.1f}" for size in sizes)
    layers = str(entry.quantized) if entry.quantized else ""
    return [name, layers, file, f"{comparison.share_of_bytes(name):.3f}", *in_memory]


def _peak(comparison: FormatComparison, name: str, extra: int | None) -> int | None:
    """Peak bytes of a pass, weights included."""
    return None if extra is None else comparison.entry(name).storage.memory_bytes + extra


def _peak_note(comparison: FormatComparison, device: torch.device) -> str:
    how = "by CUDA's allocator" if device.type == "cuda" else "by the process's resident memory"
    return (
        f"Peak: the weights in memory plus the most that one pass over a window of {comparison.length} tokens added, "
        f"measured {how}; without the library and the other formats."
    )


def _times(times: Sequence[PassTime], name: str) -> list[str]:
    variant_times = sorted((time for time in times if time.name == name), key=lambda time: time.batch)
    return [cell for time in variant_times for cell in (f"{time.latency_ms:,.1f}", f"{time.tokens_per_second:,.0f}")]


def _notes(facts: dict[str, Any], comparison: FormatComparison) -> Iterator[str]:
    yield (
        f"{comparison.windows} windows of {comparison.length} tokens ({facts['data']}, {facts['split']}). Differences "
        f"are paired with {comparison.reference} by window, ± standard error; top-1: how often the likeliest "
        f"token is that of {comparison.reference}; KL: divergence of its predictions from the format's, in nats."
    )
    yield from warnings_of(facts.get("read_before", {}), facts["data"], facts["split"])
    if "calibration" in facts:
        yield f"{STATIC} is calibrated on {facts['calibration']}."
    if "tuned" in facts:
        yield (
            f"{TUNED} is tuned and {comparison.reference} is not, so they differ by tuning and FP8 together. "
            "For the cost of FP8 after tuning, run octavo qat --baseline."
        )


def _record(
    facts: dict[str, Any],
    comparison: FormatComparison,
    extra: Mapping[str, int | None],
    times: Sequence[PassTime],
    device: torch.device,
) -> dict[str, Any]:
    return {
        **facts,
        "windows": comparison.windows,
        "context": comparison.length,
        "tokens": comparison.tokens,
        "reference": comparison.reference,
        "formats": [
            {
                "name": entry.name,
                "layers": entry.quantized,
                "nats": entry.scores.nats,
                "perplexity": entry.scores.perplexity,
                "gap": asdict(gap) | {"percent": gap.percent},
                "agreement": entry.scores.agreement,
                "divergence": entry.scores.divergence,
                **asdict(entry.storage),
                "share_of_bytes": comparison.share_of_bytes(entry.name),
                "pass_bytes": extra[entry.name],
                "peak_bytes": _peak(comparison, entry.name, extra[entry.name]),
            }
            for entry in comparison.entries
            for gap in (comparison.gap(entry.name),)
        ],
        "passes": [asdict(time) | {"tokens_per_second": time.tokens_per_second} for time in times],
        **({"passes_note": passes_note(device)} if times else {}),
    }
