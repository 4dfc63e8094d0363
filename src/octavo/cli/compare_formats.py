"""``octavo eval MODEL --compare …``: one model in several formats, beside BF16."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.bench.latency import PassTime, emulation_note, pass_times
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.contamination import Readers, default_split, readers_of, shares_read, warnings_of
from octavo.cli.progress import Display, open_display, phases
from octavo.cli.runs import own_source, text_to_train_on
from octavo.errors import ConfigError
from octavo.language_model import LanguageModel, load_language_model
from octavo.quantization import calibrate, load_calibration, load_qat, text_windows
from octavo.quantization.comparison.cache_formats import key_means
from octavo.quantization.comparison.comparison import FormatComparison, compare
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.quantization.comparison.variant_names import check_formats, line_up
from octavo.quantization.comparison.variants import (
    AS_IT_IS,
    BF16,
    CENTRED,
    STATIC,
    TUNED,
    FormatVariant,
    StaticScales,
    as_it_is,
)
from octavo.text.corpus import Split
from octavo.text.sources import TOPICS
from octavo.training.config import Device
from octavo.training.memory import extra_memory_bytes

__all__ = ["Question", "compare_formats", "evaluate_model"]

WINDOWS, LENGTH, SAMPLES, MEAN_WINDOWS, SPEED_LENGTH = 40, 512, 128, 4, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the command line asks.

    Attributes:
        source: of the text; None is the run's own, or Python's language reference for other models.
        split: of the source; None is the run's test split, or all of it.
        windows: how many.
        length: tokens of each; None is the model's context, at most 512.
        calibration: folder of ``octavo calibrate``; None calibrates on the spot.
        samples: windows to calibrate with then.
        tuned: folder of ``octavo qat``.
        speed: whether to time a pass.
        device: where to run.
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


def evaluate_model(question: Question, *, as_json: bool) -> None:
    """Print the loss of a model that is no run: in FP32, or with the codes that its folder has."""
    with open_display() as display:
        model = load_language_model(question.model, device=question.device)
        windows, text = _windows(model, question, readers_of(question.model))
        found = _compared(display, [as_it_is(model)], windows, reference=AS_IT_IS)
    entry = found.entry(AS_IT_IS)
    record = {
        "model": question.model,
        "format": f"FP8 codes in {entry.quantized} layers, as stored" if entry.quantized else "FP32",
        **text,
        "windows": found.windows,
        "context": found.length,
        "tokens": found.tokens,
        "nats": entry.scores.nats,
        "perplexity": entry.scores.perplexity,
    }
    if as_json:
        print_json(record)
        return
    shares = record.pop("read_before", {})
    rows = [(name, number(value, 6) if isinstance(value, int | float) else value) for name, value in record.items()]
    print_table("Evaluation", ["", ""], rows)
    for warning in warnings_of(shares, record["data"], record["split"]):
        stdout().print(warning, markup=False, soft_wrap=True)


def compare_formats(question: Question, names: Sequence[str], *, as_json: bool) -> None:
    """Print how a model fares in each format."""
    names = check_formats(names)
    _check_folders(question, names)
    with open_display() as display:
        model = load_language_model(question.model, device=question.device)
        windows, text = _windows(model, question, _readers(question, names))
        calibration, calibrated_on = _calibration(model, question, names, display)
        tuned = load_qat(question.tuned) if question.tuned is not None else None
        if tuned is not None:
            tuned.model.to(model.device)
        means = _means(model, question, display) if CENTRED in names else None
        show = display.phase("prepare formats", len(names))
        contestants = line_up(
            model,
            names,
            calibration=calibration,
            tuned_model=tuned,
            means=means,
            advance=lambda done, _: show(done),
        )
        found = _compared(display, contestants, windows)
        extra = _extra_memory(display, contestants, windows)
        times = _timed(display, contestants, windows) if question.speed else []
    facts = {"model": question.model, **text, **calibrated_on}
    if tuned is not None:
        facts["tuned"] = str(question.tuned)
    if as_json:
        print_json(_record(facts, found, extra, times, model.device))
        return
    _print(facts, found, extra, times, model.device)


def _readers(question: Question, names: Sequence[str]) -> Readers:
    calibrates = bool({STATIC, CENTRED} & {*names})
    return readers_of(question.model, calibrates=calibrates, calibration=question.calibration, tuned=question.tuned)


def _windows(model: LanguageModel, question: Question, readers: Readers) -> tuple[Tensor, dict[str, Any]]:
    """The windows to score, what they are of, and how much of that was read before."""
    source = question.source or own_source(question.model) or TOPICS
    split = question.split or default_split(question.model, readers, source)
    windows = evaluation_windows(model, source, split, count=question.windows, length=_length(model, question))
    text = {"data": source, "split": split}
    return windows, text | ({"read_before": shares_read(readers, source, split)} if readers else {})


def _length(model: LanguageModel, question: Question) -> int:
    """Tokens of a window."""
    return min(LENGTH, model.context) if question.length is None else question.length


def _check_folders(question: Question, names: Sequence[str]) -> None:
    """Refuse a folder that no format uses, and a format that lacks its folder, before anything is computed."""
    uses = (("--calibration", question.calibration, (STATIC, CENTRED)), ("--qat", question.tuned, (TUNED,)))
    for option, folder, users in uses:
        if folder is not None and not {*users} & {*names}:
            raise ConfigError(
                f"{option} is for {' and '.join(users)}, which is not compared; add it to --compare, or leave it out"
            )
    if TUNED in names and question.tuned is None:
        raise ConfigError(f"{TUNED} needs --qat: the folder that octavo qat has written; name it, or leave it out")


def _calibration(
    model: LanguageModel, question: Question, names: Sequence[str], display: Display
) -> tuple[StaticScales | None, dict[str, Any]]:
    """The scales of fp8-static: those in a folder, or of text that the evaluation does not have."""
    if STATIC not in names:
        return None, {}
    if question.calibration is not None:
        return load_calibration(question.calibration), {"calibration": str(question.calibration)}
    batches = _training_windows(model, question, question.samples)
    advance = display.phase("calibrate", len(batches))
    source = text_to_train_on(question.model)
    found = calibrate(model, [window[None] for window in batches], on_batch=lambda done, _: advance(done))
    return found, {"calibration": f"{len(batches)} windows of {source}, train"}


def _means(model: LanguageModel, question: Question, display: Display) -> Mapping[int, Tensor]:
    """Of keys: a calibration's, or of some of the text that fp8-static would be calibrated on."""
    if question.calibration is not None:
        return load_calibration(question.calibration).means_of_keys(model)
    display.phase("means of keys", None)
    return key_means(model, _training_windows(model, question, MEAN_WINDOWS))


def _training_windows(model: LanguageModel, question: Question, count: int) -> Tensor:
    """Text that the evaluation does not have, in windows of the same length."""
    source = text_to_train_on(question.model)
    return text_windows(model, source, str(Split.TRAIN), count=count, length=_length(model, question))


def _compared(
    display: Display, contestants: Sequence[FormatVariant], windows: Tensor, reference: str = BF16
) -> FormatComparison:
    advance = display.phase("evaluate", len(windows) * len(contestants))
    return compare(contestants, windows, reference=reference, advance=lambda done, _: advance(done))


def _extra_memory(display: Display, contestants: Sequence[FormatVariant], windows: Tensor) -> dict[str, int | None]:
    """What a pass over a window takes beside the weights; every format has run by then."""
    display.phase("memory of a pass", None)
    return {
        contestant.name: extra_memory_bytes(windows.device, partial(contestant.logits, windows[:1]))
        for contestant in contestants
    }


def _timed(display: Display, contestants: Sequence[FormatVariant], windows: Tensor) -> list[PassTime]:
    show = phases(display)
    return pass_times(
        {contestant.name: contestant for contestant in contestants},
        windows[0, :SPEED_LENGTH],
        advance=lambda done, total: show("time passes", done, total),
    )


QUALITY = ["format", "perplexity", "vs BF16", "nats more", "top-1", "KL"]
SIZES = ["format", "layers in it", "file, MB", "of BF16's", "memory, MB", "peak, MB"]


def _print(
    facts: dict[str, Any],
    found: FormatComparison,
    extra: Mapping[str, int | None],
    times: Sequence[PassTime],
    device: torch.device,
) -> None:
    """Tables that are whole on a terminal of 80 columns, each for one question."""
    names = [entry.name for entry in found.entries]
    print_table(f"{facts['model']} on {facts['data']}", QUALITY, [_quality(found, name) for name in names])
    for line in _notes(facts, found):
        stdout().print(line, markup=False, soft_wrap=True)
    print_table("Weights", SIZES, [_sizes(found, name, extra[name]) for name in names])
    stdout().print(_peak_note(found, device), markup=False, soft_wrap=True)
    if times:
        columns = [word for batch in sorted({time.batch for time in times}) for word in (f"ms at {batch}", "tokens/s")]
        title = f"A pass over {times[0].length} tokens a sequence, by batch"
        print_table(title, ["format", *columns], [[name, *_times(times, name)] for name in names])
        stdout().print(emulation_note(device), markup=False, soft_wrap=True)


def _quality(found: FormatComparison, name: str) -> list[str]:
    scores, gap = found.entry(name).scores, found.gap(name)
    if name == found.reference:
        return [name, f"{scores.perplexity:.4f}", *[""] * 4]
    return [
        name,
        f"{scores.perplexity:.4f}",
        f"{gap.percent:+.2f} %",
        f"{gap.nats:+.4f} ± {gap.standard_error:.4f}",
        f"{scores.agreement:.2%}",
        f"{scores.divergence:.5f}",
    ]


def _sizes(found: FormatComparison, name: str, extra: int | None) -> list[str]:
    entry = found.entry(name)
    sizes = (entry.storage.file_bytes, entry.storage.memory_bytes, _peak(found, name, extra))
    file, *in_memory = ("–" if size is None else f"{size / 1e6:,.1f}" for size in sizes)
    layers = str(entry.quantized) if entry.quantized else ""
    return [name, layers, file, f"{found.share_of_bytes(name):.3f}", *in_memory]


def _peak(found: FormatComparison, name: str, extra: int | None) -> int | None:
    """Weights, and the most that a pass takes beside them."""
    return None if extra is None else found.entry(name).storage.memory_bytes + extra


def _peak_note(found: FormatComparison, device: torch.device) -> str:
    how = "by CUDA's allocator" if device.type == "cuda" else "by the process's resident memory"
    return (
        f"Peak: the weights in memory, and the most that one pass over a window of {found.length} tokens took beside "
        f"them here, {how}; not the library, nor the other formats."
    )


def _times(times: Sequence[PassTime], name: str) -> list[str]:
    own = sorted((time for time in times if time.name == name), key=lambda time: time.batch)
    return [cell for time in own for cell in (f"{time.latency_ms:,.1f}", f"{time.tokens_per_second:,.0f}")]


def _notes(facts: dict[str, Any], found: FormatComparison) -> Iterator[str]:
    yield (
        f"{found.windows} windows of {found.length} tokens ({facts['data']}, {facts['split']}). Differences are paired "
        f"with {found.reference}, window by window, ± their standard error; top-1: how often the likeliest next token "
        f"is {found.reference}'s; KL: of its predictions from the format's, in nats."
    )
    yield from warnings_of(facts.get("read_before", {}), facts["data"], facts["split"])
    if "calibration" in facts:
        yield f"{STATIC} is calibrated on {facts['calibration']}."
    if "tuned" in facts:
        yield (
            f"{TUNED} is tuned and {found.reference} is not: between them lie the tuning and FP8 together. What FP8 "
            "costs after tuning is what octavo qat --baseline prints."
        )


def _record(
    facts: dict[str, Any],
    found: FormatComparison,
    extra: Mapping[str, int | None],
    times: Sequence[PassTime],
    device: torch.device,
) -> dict[str, Any]:
    return {
        **facts,
        "windows": found.windows,
        "context": found.length,
        "tokens": found.tokens,
        "reference": found.reference,
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
                "share_of_bytes": found.share_of_bytes(entry.name),
                "pass_bytes": extra[entry.name],
                "peak_bytes": _peak(found, entry.name, extra[entry.name]),
            }
            for entry in found.entries
            for gap in (found.gap(entry.name),)
        ],
        "passes": [asdict(time) | {"tokens_per_second": time.tokens_per_second} for time in times],
        **({"passes_note": emulation_note(device)} if times else {}),
    }
