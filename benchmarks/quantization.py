"""SmolLM2-135M in several formats against BF16: perplexity, agreement, divergence, sizes; keys and values in FP8.

    python -m benchmarks.quantization [--tuned FOLDER] [--windows 40] [--cache-windows 10] [--samples 128] [--speed]

The text is Python's language reference. Weights and activations are compared on the first 20,480 tokens in windows of
512, caches of keys and values on the same tokens in windows of 2,048. Scales of fp8-static and means of keys come from
the library's sources, which are disjoint from that text. FOLDER is the output of ``octavo qat``; without it there is no
row fp8-qat.

| bar                              | is                                                                               |
|----------------------------------|----------------------------------------------------------------------------------|
| fp8-dynamic                      | the +2.39 % of BF16's perplexity that another implementation measured            |
|                                  | (14.3815 against 14.0462, perhaps of another Python's topics), within two        |
|                                  | standard errors of the paired difference                                         |
| fp8-static                       | at most +3.0 %                                                                   |
| fp8-kv, fp8-kv-centred           | at most +0.5 %, at half of BF16's bytes                                          |
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from benchmarks import smollm2
from benchmarks.measure import bf16_note, hardware, markdown_table, publish, verdict
from octavo.bench.latency import PassTime, pass_times, passes_note
from octavo.language_model import LanguageModel
from octavo.quantization import calibrate, load_qat, text_windows
from octavo.quantization.comparison.comparison import FormatComparison, compare
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.quantization.comparison.kv_cache_round_trip import key_means, vector_bytes
from octavo.quantization.comparison.variants import CACHE, CENTRED, STATIC, TUNED, line_up
from octavo.text.sources import LIBRARY_SOURCES, TOPICS
from octavo.training.memory import extra_memory_bytes

WINDOW, CACHE_WINDOW, MEAN_WINDOWS = 512, 2048, 4
FORMATS = ("fp32", "bf16", "int8", "fp8-dynamic", "fp8-rowwise", "fp8-blockwise", STATIC)
REFERENCE_NATS = math.log(14.3815 / 14.0462)  # fp8 per tensor over bf16, the same model
STATIC_NATS, CACHE_NATS = math.log(1.03), math.log(1.005)
CACHE_BYTES = 0.5
STANDARD_ERRORS = 2.0
SPEED_LENGTH = 128
HEADER = ["format", "perplexity", "against BF16", "nats more (± standard error)", "top-1 as BF16", "KL from BF16"]
SIZES = ["file, MB", "of BF16's", "in memory, MB", "peak, MB"]


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path, metavar="FOLDER", help="of octavo qat, for fp8-qat")
    parser.add_argument("--windows", type=int, default=40, help="of 512 tokens, for the formats")
    parser.add_argument("--cache-windows", type=int, default=10, help="of 2048 tokens, for the caches")
    parser.add_argument("--samples", type=int, default=128, help="windows that fp8-static is calibrated on")
    parser.add_argument("--speed", action="store_true", help="time passes too")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine, model = hardware(), smollm2.load()
    tuned = None if arguments.tuned is None else load_qat(arguments.tuned)
    lines = format_lines(model, tuned, arguments.windows, arguments.samples, speed=arguments.speed)
    lines += ["", *cache_lines(model, arguments.cache_windows)]
    title = "SmolLM2-135M in FP8 and INT8 against BF16"
    publish("quantization", lines, title=title, machine=machine, write=not arguments.no_write)


def format_lines(
    model: LanguageModel, tuned: LanguageModel | None, windows: int, samples: int, *, speed: bool
) -> list[str]:
    """Table of the formats, the verdicts of the bars, and the times if ``speed``."""
    calibration = calibrate(model, [window[None] for window in _training_text(model, samples, WINDOW)])
    names = FORMATS if tuned is None else (*FORMATS, TUNED)
    contestants = line_up(model, names, calibration=calibration, tuned_model=tuned)
    text = evaluation_windows(model, TOPICS, "all", count=windows, length=WINDOW)
    comparison = compare(contestants, text)
    passes = {each.name: partial(each.logits, text[:1]) for each in contestants}
    extra = {name: extra_memory_bytes(text.device, one) for name, one in passes.items()}
    lines = [
        f"{windows} windows of {WINDOW} tokens; differences are paired.",
        "",
        *comparison_table(comparison, extra),
        "",
    ]
    lines += format_bars(comparison)
    lines += ["", "Peak: the weights, and the largest extra memory of a pass over one window."]
    if tuned is not None:
        lines.append(f"{TUNED} is tuned and bf16 is not: between them lie the tuning and FP8.")
    lines.append("Head, embedding and norms are in BF16 in all but fp32. " + bf16_note())
    if speed:
        times = pass_times({each.name: each for each in contestants}, text[0, :SPEED_LENGTH])
        lines += ["", *speed_table(times), "", passes_note(model.device)]
    return lines


def cache_lines(model: LanguageModel, windows: int) -> list[str]:
    """Table of the caches, and the verdicts of the bar."""
    means = key_means(model, _training_text(model, MEAN_WINDOWS, CACHE_WINDOW))
    text = evaluation_windows(model, TOPICS, "all", count=windows, length=CACHE_WINDOW)
    comparison = compare(line_up(model, ["bf16", CACHE, CENTRED], means=means), text)
    head_dim = next(iter(means.values())).shape[-1]
    return [
        f"Keys and values in FP8, everything else in BF16: {windows} windows of {CACHE_WINDOW} tokens.",
        "",
        *comparison_table(comparison),
        "",
        *cache_bars(comparison, head_dim),
    ]


def _training_text(model: LanguageModel, count: int, length: int) -> Tensor:
    return text_windows(model, LIBRARY_SOURCES, "train", count=count, length=length)


def comparison_table(comparison: FormatComparison, extra: Mapping[str, int | None] | None = None) -> list[str]:
    """Table with a row for each format, with sizes if ``extra`` has the memory of a pass without the weights."""
    rows = []
    for entry in comparison.entries:
        gap, scores, storage = comparison.gap(entry.name), entry.scores, entry.storage
        row = [entry.name, f"{scores.perplexity:.4f}"]
        if entry.name == comparison.reference:
            row += [""] * 4
        else:
            row += [f"{gap.percent:+.2f} %", f"{gap.nats:+.4f} ± {gap.standard_error:.4f}"]
            row += [f"{scores.agreement:.2%}", f"{scores.divergence:.5f}"]
        if extra is not None:
            row += [f"{storage.file_bytes / 1e6:.1f}", f"{comparison.share_of_bytes(entry.name):.3f}"]
            row.append(f"{storage.memory_bytes / 1e6:.1f}")
            row.append(f"{(storage.memory_bytes + most) / 1e6:.1f}" if (most := extra[entry.name]) is not None else "–")
        rows.append(row)
    return markdown_table(HEADER if extra is None else [*HEADER, *SIZES], rows)


def format_bars(comparison: FormatComparison) -> list[str]:
    """Verdicts of the bars on fp8-dynamic and fp8-static."""
    gap = comparison.gap("fp8-dynamic")
    off, allowed = gap.nats - REFERENCE_NATS, STANDARD_ERRORS * gap.standard_error
    lines = [
        f"- fp8-dynamic: {verdict(abs(off) <= allowed)}; {off:+.4f} nats from the reference's {REFERENCE_NATS:+.4f}"
    ]
    lines[0] += f", and {STANDARD_ERRORS:g} standard errors are {allowed:.4f}"
    gap = comparison.gap(STATIC)
    return [*lines, f"- {STATIC}: {verdict(gap.nats <= STATIC_NATS)}; {gap.percent:+.2f} %, at most +3.0 %"]


def cache_bars(comparison: FormatComparison, head_dim: int) -> list[str]:
    """Verdict of the bar on each cache, and its bytes."""
    lines = []
    share = vector_bytes(head_dim) / (2 * head_dim)
    for name in (CACHE, CENTRED):
        gap = comparison.gap(name)
        lines.append(
            f"- {name}: {verdict(gap.nats <= CACHE_NATS)} in perplexity, {gap.percent:+.2f} % (bar +0.5 %); "
            f"{verdict(share <= CACHE_BYTES)} in bytes, {share:.3f} of BF16's (bar {CACHE_BYTES:g})"
        )
    return lines


def speed_table(times: Sequence[PassTime]) -> list[str]:
    """Table of the median time of a pass, by format and batch."""
    rows = [[t.name, str(t.batch), f"{t.latency_ms:,.0f}", f"{t.tokens_per_second:,.0f}"] for t in times]
    return markdown_table(["format", "batch", f"latency of {times[0].length} tokens, ms", "tokens/s"], rows)


if __name__ == "__main__":
    main()
