"""Perplexity with the FP8 cache of keys and values, and with variants of its design.

    python -m benchmarks.kv_cache [--windows 10] [--designs "searched,keys only"] [--no-write]

SmolLM2-135M on Python's language reference, in windows of 2,048 tokens. First the computation of ``octavo generate``: a
ModelRunner with FP8 weights and an FP8 cache, with and without a calibration's means of keys, against the same with a
BF16 cache. Then emulated designs: the model in BF16, whose attention reads keys and values as the design decodes them.
``searched`` and ``searched, centred`` are the cache of generation (``fp8-kv``, ``fp8-kv-centred`` of ``octavo eval``);
the others show the effect of each choice. Means and amaxes are those of other text, the library's sources.

The bar: the FP8 cache costs at most 0.5 % of perplexity, at half of BF16's bytes.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import smollm2
from benchmarks.measure import hardware, markdown_table, publish, verdict
from benchmarks.quantization import CACHE_NATS, CACHE_WINDOW, MEAN_WINDOWS, comparison_table
from octavo import E4M3, PerRow, quantize
from octavo.errors import DataError
from octavo.formats import BF16, Format
from octavo.inference import ModelRunner
from octavo.language_model import KVTransform, LanguageModel, load_language_model
from octavo.models import Llama
from octavo.numerics import ScaleRounding
from octavo.quantization import text_windows
from octavo.quantization.comparison.comparison import compare
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.quantization.comparison.kv_cache_round_trip import as_cached
from octavo.quantization.comparison.variants import high_precision
from octavo.text.sources import LIBRARY_SOURCES, TOPICS
from octavo.training.evaluate import token_loss

FIRST = 4  # tokens that a design keeps in BF16
AT_ONCE = 512  # tokens that a runner reads in a call: their logits take 100 MB
Cast = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatistics:
    """Mean and amax of each layer's keys over other text, after rotary positions, [kv heads, D]."""

    mean: Mapping[int, Tensor]
    amax: Mapping[int, Tensor]


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--designs", default="", help="some of them, by commas, or none; all by default")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine = hardware()
    try:
        model = load_language_model(smollm2.model_path())
    except DataError as error:
        parser.exit(2, f"{error}\n")
    selected = arguments.designs.split(",") if arguments.designs else []
    other = text_windows(model, LIBRARY_SOURCES, "train", count=MEAN_WINDOWS, length=CACHE_WINDOW)
    keys = key_statistics(model, other)
    text = evaluation_windows(model, TOPICS, "all", count=arguments.windows, length=CACHE_WINDOW)
    lines = runner_lines(model, text, keys.mean)
    if selected != ["none"]:
        lines += ["", *design_lines(model, text, keys, selected)]
    publish("kv_cache", lines, title="The FP8 cache of keys and values", machine=machine, write=not arguments.no_write)


def runner_lines(model: LanguageModel, windows: Tensor, means: Mapping[int, Tensor]) -> list[str]:
    """Table of the runner's perplexity with each cache, and the verdicts of the bar."""
    assert isinstance(model.model, Llama)
    plain, centred = ModelRunner(model.model), ModelRunner(model.model, key_means=means)
    caches = {"BF16": (plain, BF16), "FP8": (plain, E4M3), "FP8, keys less their means": (centred, E4M3)}
    losses = {
        name: [runner_nats(*cached_runner, window) for window in windows] for name, cached_runner in caches.items()
    }
    size = {name: runner.new_cache(fmt=fmt).nbytes for name, (runner, fmt) in caches.items()}
    header = ["cache", "perplexity", "against BF16", "nats more (± standard error)", "bar", "bytes ÷ BF16"]
    rows = []
    for name, window_losses in losses.items():
        gaps = [one - other for one, other in zip(window_losses, losses["BF16"], strict=True)]
        more, error = (
            statistics.mean(gaps),
            statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan,
        )
        gap = [f"{100 * math.expm1(more):+.2f} %", f"{more:+.4f} ± {error:.4f}", verdict(more <= CACHE_NATS)]
        share = size[name] / size["BF16"]
        perplexity, judged = math.exp(statistics.mean(window_losses)), gap if name != "BF16" else [""] * 3
        rows.append([name, f"{perplexity:.4f}", *judged, f"{share:.3f}"])
    head = f"A runner with FP8 weights, {len(windows)} windows of {windows.shape[1]} tokens; differences are paired."
    return [head, "", *markdown_table(header, rows)]


def runner_nats(runner: ModelRunner, fmt: Format, window: Tensor) -> float:
    """Mean loss, in nats, of the tokens of a window but the first."""
    cache, total = runner.new_cache(len(window), fmt=fmt), 0.0
    for tokens, following in zip(window[:-1].split(AT_ONCE), window[1:].split(AT_ONCE), strict=True):
        total += len(tokens) * float(token_loss(runner(tokens, cache, every=True)[None], following[None]))
    return total / (len(window) - 1)


def design_lines(model: LanguageModel, windows: Tensor, keys: KeyStatistics, chosen: list[str]) -> list[str]:
    """Table with a row for each design."""
    known = designs(keys)
    bf16 = high_precision(model, "bf16")
    entered = [replace(bf16, name=name, cache=known[name]) for name in chosen or known]
    table = comparison_table(compare([bf16, *entered], windows))
    return ["Designs, in BF16 around the cache; the same windows.", "", *table]


def designs(keys: KeyStatistics) -> dict[str, KVTransform]:
    """All designs by name; each changes one or two things of the first."""
    by_two = _power_of_two_scales
    return {
        "power-of-two scales": _design(by_two, by_two),
        "keys only": _design(by_two, _kept),
        "values only": _design(_kept, by_two),
        "first tokens in BF16": _first_kept(_design(by_two, by_two)),
        "FP32 scales": _design(_fp32_scales, _fp32_scales),
        "a scale a channel of keys": _design(by_two, by_two, divided=keys.amax),
        "power-of-two scales, centred": _design(by_two, by_two, centred=keys.mean),
        "FP32 scales, centred": _design(_fp32_scales, _fp32_scales, centred=keys.mean),
        "searched": _design(as_cached, as_cached),
        "searched, centred": _design(as_cached, as_cached, centred=keys.mean),
    }


def _design(
    keys: Cast,
    values: Cast,
    *,
    centred: Mapping[int, Tensor] | None = None,
    divided: Mapping[int, Tensor] | None = None,
) -> KVTransform:
    def through(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stored = k.float()
        if centred is not None:
            stored = stored - centred[layer]
        read = keys(stored) if divided is None else keys(stored / divided[layer]) * divided[layer]
        return read.to(k.dtype), values(v.float()).to(v.dtype)

    return through


def _first_kept(design: KVTransform) -> KVTransform:
    def through(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cast = design(layer, k, v)
        return torch.cat([k[:, :FIRST], cast[0][:, FIRST:]], 1), torch.cat([v[:, :FIRST], cast[1][:, FIRST:]], 1)

    return through


def _kept(vectors: Tensor) -> Tensor:
    return vectors


def _power_of_two_scales(vectors: Tensor) -> Tensor:
    """The smallest power of two that keeps a vector within 448."""
    return quantize(vectors, E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL, amax_floor=0).dequantize()


def _fp32_scales(vectors: Tensor) -> Tensor:
    return quantize(vectors, E4M3, granularity=PerRow()).dequantize()


@torch.no_grad()
def key_statistics(model: LanguageModel, windows: Tensor) -> KeyStatistics:
    """Mean and amax of the keys over windows [count, length]."""
    sums: dict[int, Tensor] = {}
    amax: dict[int, Tensor] = {}

    def note(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        flat = keys.flatten(0, 1)
        sums[layer] = sums.get(layer, torch.zeros(())) + flat.double().sum(0)
        amax[layer] = torch.maximum(amax.get(layer, torch.zeros(())), flat.abs().amax(0))
        return keys, values

    for window in windows:
        model.logits(window[None], note)
    return KeyStatistics(mean={layer: (total / windows.numel()).float() for layer, total in sums.items()}, amax=amax)


if __name__ == "__main__":
    main()
