"""Why the FP8 cache of keys and values costs what it does, and what each change of its design is worth.

    python -m benchmarks.kv_cache [--windows 10] [--designs "today,keys only"] [--no-write]

SmolLM2-135M in BF16, Python's language reference in windows of 2,048 tokens; attention reads keys and values as the
design decodes them. Means and amaxes are those of other text, the library's sources. ``today`` is octavo's cache, a
power-of-two scale for each vector; ``centred and searched`` is ``fp8-kv-centred`` of ``octavo eval``.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import smollm2
from benchmarks.measure import hardware, write_result
from benchmarks.quantization import CACHE_WINDOW, MEAN_WINDOWS, comparison_table
from octavo import E4M3, PerRow, quantize
from octavo.errors import DataError
from octavo.language_model import KeysAndValues, LanguageModel, load_language_model
from octavo.quantization import text_windows
from octavo.quantization.comparison.cache_formats import power_of_two_scales, searched_scales
from octavo.quantization.comparison.comparison import compare
from octavo.quantization.comparison.contestants import high_precision
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.training.text import LIBRARY_SOURCES, TOPICS

FIRST = 4  # tokens that a design keeps in BF16
Cast = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatistics:
    """Of each layer's keys over other text, rotary positions included, [kv heads, D]."""

    mean: Mapping[int, Tensor]
    amax: Mapping[int, Tensor]


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--designs", default="", help="some of them, by commas; all by default")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine, console = hardware(), Console()
    try:
        model = load_language_model(smollm2.model_path())
    except DataError as error:
        parser.exit(2, f"{error}\n")
    chosen = arguments.designs.split(",") if arguments.designs else []
    lines = design_lines(model, arguments.windows, chosen)
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if not arguments.no_write:
        command = f"python -m benchmarks.kv_cache --windows {arguments.windows}"
        title = "Designs of an FP8 cache of keys and values"
        path = write_result("kv_cache", lines, title=title, command=command, machine=machine)
        console.print(f"written to {path}", markup=False)


def design_lines(model: LanguageModel, windows: int, chosen: list[str]) -> list[str]:
    """A row for each design."""
    other = text_windows(model, LIBRARY_SOURCES, "train", count=MEAN_WINDOWS, length=CACHE_WINDOW)
    known = designs(key_statistics(model, other))
    bf16 = high_precision(model, "bf16")
    entered = [replace(bf16, name=name, cache=known[name]) for name in chosen or known]
    text = evaluation_windows(model, TOPICS, "all", count=windows, length=CACHE_WINDOW)
    table = comparison_table(compare([bf16, *entered], text), sizes=False)
    return [f"{windows} windows of {CACHE_WINDOW} tokens; differences are paired.", "", *table]


def designs(keys: KeyStatistics) -> dict[str, KeysAndValues]:
    """All designs by name; each changes one or two things of today's cache."""
    by_two, searched = power_of_two_scales, searched_scales
    return {
        "today": _design(by_two, by_two),
        "keys only": _design(by_two, _kept),
        "values only": _design(_kept, by_two),
        "first tokens in BF16": _first_kept(_design(by_two, by_two)),
        "FP32 scales": _design(_fp32_scales, _fp32_scales),
        "a scale a channel of keys": _design(by_two, by_two, divided=keys.amax),
        "centred": _design(by_two, by_two, centred=keys.mean),
        "centred, FP32 scales": _design(_fp32_scales, _fp32_scales, centred=keys.mean),
        "searched": _design(searched, searched),
        "centred and searched": _design(searched, searched, centred=keys.mean),
    }


def _design(
    keys: Cast,
    values: Cast,
    *,
    centred: Mapping[int, Tensor] | None = None,
    divided: Mapping[int, Tensor] | None = None,
) -> KeysAndValues:
    def through(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stored = k.float()
        if centred is not None:
            stored = stored - centred[layer]
        read = keys(stored) if divided is None else keys(stored / divided[layer]) * divided[layer]
        return read.to(k.dtype), values(v.float()).to(v.dtype)

    return through


def _first_kept(design: KeysAndValues) -> KeysAndValues:
    def through(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cast = design(layer, k, v)
        return torch.cat([k[:, :FIRST], cast[0][:, FIRST:]], 1), torch.cat([v[:, :FIRST], cast[1][:, FIRST:]], 1)

    return through


def _kept(vectors: Tensor) -> Tensor:
    return vectors


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

    with model.keys_and_values_through(note) as logits:
        for window in windows:
            logits(window[None])
    return KeyStatistics(mean={layer: (total / windows.numel()).float() for layer, total in sums.items()}, amax=amax)


if __name__ == "__main__":
    main()
