"""Text generation with a real model: octavo's FP8 runner against llama.cpp's Q8_0 and transformers.

    python -m benchmarks.decode [--rounds 7] [--windows 40] [--no-write]

The model is SmolLM2-135M-Instruct (benchmarks/smollm2.py), and all use the same weights: those of its Q4_1 file,
decoded. octavo stores them as FP8 codes, including the head, with FP8 keys and values; llama.cpp as Q8_0, converted
from the same file, with its defaults; transformers as BF16 and FP32.

- decode: 128 tokens, one at a time, each the likeliest, after a prompt of 64 tokens, which is not timed; transformers
  generates fewer, after the same prompt. A token reads every weight once, so a plain read of as many bytes is compared.
- prefill: 512 tokens at once, and the logits after the last.
- perplexity: windows of 512 tokens that do not overlap, each token predicted from the earlier ones in its window. FP8
is
  compared with FP32. octavo's kernels are compared with torch's operations on the same codes: with FP32 keys and values
  only the order of sums differs, and the bound is a hundred-thousandth of a nat. With FP8 keys and values that order
  changes a few roundings, which change those of later layers, so that rounding errors differ at random: the mean over
  the windows must be within three standard errors of the reference's.

The text is Python's language topics. All use torch's number of threads. A speed is tokens divided by the median time; a
comparison is the median of the rounds' ratios, with quartiles.
"""

import argparse
import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import smollm2
from benchmarks.cpu_kernels import HEADER, Bound, Contestant, result_rows
from benchmarks.generators import Generator, LlamaCpp, Octavo, Plain, Transformers, q8_0_of
from benchmarks.measure import bf16_note, hardware, interleaved, markdown_table, publish
from octavo import E4M3, PerRow, quantize
from octavo.errors import BackendError, DataError
from octavo.formats import FP32
from octavo.inference import ModelRunner
from octavo.kernels import native_bindings as cpu
from octavo.models import Llama, load_gguf
from octavo.models.gguf_file import GGUFFile
from octavo.quantization.comparison.evaluation_text import topic_tokens
from octavo.training.evaluate import token_loss

PROMPT, NEW, FEW = 64, 128, 8  # tokens
READS = 32  # one alone depends on what ran before it
WINDOW = 512
OURS, Q8_0, HALF, FULL = "octavo FP8", "llama.cpp Q8_0", "transformers bfloat16", "transformers float32"
DECODE_BARS = {Q8_0: 1.5, HALF: 3.0, FULL: None}
PREFILL_BARS = {Q8_0: 2.0, HALF: 0.9, FULL: None}
KERNELS, REFERENCE = "octavo's kernels", "octavo, torch's operations"
PLAIN = "octavo's model, no cache"
UNCHANGED_NATS, STANDARD_ERRORS = 1e-5, 3.0


def main() -> None:
    """Time, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=40, help="of the perplexity")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    if (absence := cpu.why_absent()) is not None:
        parser.exit(2, f"there are no native kernels to time: {absence}\n")
    try:
        path = smollm2.model_path()
        loaded, q8_0 = load_gguf(path), q8_0_of(path, torch.get_num_threads())
        peer = LlamaCpp(q8_0, WINDOW, torch.get_num_threads())
    except (BackendError, DataError) as error:
        parser.exit(2, f"{error}\n")
    machine = f"{hardware()}, kernels for {cpu.levels()[-1]}, {peer.facts()}, transformers {version('transformers')}"
    ids = topic_tokens(loaded.tokenizer, WINDOW * max(1, arguments.windows))
    entered = contestants(loaded.model, peer, weight_bytes(q8_0), ids)
    seconds = interleaved({name: entry.run for name, entry in entered.items()}, rounds=arguments.rounds)
    lines = [*speed_lines(entered, seconds), ""]
    lines += perplexity_lines(window_losses(loaded.model, peer, windows_of(ids, arguments.windows)))
    publish("decode", lines, title="Generation with SmolLM2-135M", machine=machine, write=not arguments.no_write)


def speed_lines(entered: Mapping[str, Contestant], seconds: Mapping[str, list[float]]) -> list[str]:
    """Table of speeds, and the number of bars met."""
    each = {name: [time / entered[name].work for time in times] for name, times in seconds.items()}  # for one token
    rows = list(result_rows({name: replace(entry, work=1.0) for name, entry in entered.items()}, each))
    verdicts = [row[-1] for row in rows if row[-1]]
    rounds = len(next(iter(seconds.values())))
    return [
        *markdown_table(HEADER, rows),
        "",
        f"{sum(word.startswith('met') for word in verdicts)} of {len(verdicts)} bars met.",
        "",
        f"Median of {rounds} interleaved rounds (quartiles). {bf16_note()}",
    ]


def contestants(model: Llama, peer: LlamaCpp, peer_bytes: int, ids: Sequence[int]) -> dict[str, Contestant]:
    """All contestants by name, in order; ``work`` is tokens."""
    runner, shape = ModelRunner(model), model.config
    own = Octavo(runner, WINDOW)
    half = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim  # bytes of a position in FP16
    seen = PROMPT + NEW // 2  # positions that a token looks back at, on average
    read = {OURS: runner.weight_bytes + seen * own.position_bytes, Q8_0: peer_bytes + seen * half}
    generators: dict[str, Generator] = {OURS: own, Q8_0: peer}
    generators |= {HALF: Transformers(model, torch.bfloat16), FULL: Transformers(model, torch.float32)}
    entered = {f"read {_megabytes(size)}": reading(size) for size in read.values()}
    for name, generator in generators.items():
        count = NEW if name in read else FEW
        bounds = [Bound((f"read {_megabytes(read[name])}",))] if name in read else []
        bounds += [Bound((f"decode, {other}",), bar) for other, bar in DECODE_BARS.items() if name == OURS]
        entered[f"decode, {name}"] = _tokens(decoding(generator, ids[:PROMPT], count), count, *bounds)
    for name, generator in generators.items():
        bounds = [Bound((f"prefill, {other}",), bar) for other, bar in PREFILL_BARS.items() if name == OURS]
        entered[f"prefill, {name}"] = _tokens(prefilling(generator, ids[:WINDOW]), WINDOW, *bounds)
    return entered


def reading(size: int) -> Contestant:
    """Plain read of a token's bytes, which bounds the tokens per second."""
    data = torch.ones(size // 8, dtype=torch.int64)
    return _tokens(lambda: [data.sum() for _ in range(READS)], READS)


def decoding(generator: Generator, prompt: Sequence[int], count: int) -> Callable[[], list[int]]:
    """Call that generates the likeliest tokens after a prompt. Reads the prompt now; later texts must begin with it."""
    generator.rewind(0)
    first = int(generator.logits(prompt).argmax())

    def run() -> list[int]:
        generator.rewind(len(prompt))
        tokens = [first]
        for _ in range(count):
            tokens.append(int(generator.logits(tokens[-1:]).argmax()))
        return tokens

    return run


def prefilling(generator: Generator, tokens: Sequence[int]) -> Callable[[], Tensor]:
    """Call that computes the logits after many tokens at once."""

    def run() -> Tensor:
        generator.rewind(0)
        return generator.logits(tokens)

    return run


def weight_bytes(path: Path) -> int:
    """Bytes of all tensors of a .gguf file."""
    return sum(tensor.end - tensor.start for tensor in GGUFFile(path).tensors.values())


def windows_of(ids: Sequence[int], count: int) -> list[Sequence[int]]:
    """The first windows of the text."""
    return [ids[start : start + WINDOW] for start in range(0, count * WINDOW, WINDOW)]


def window_losses(
    model: Llama, peer: LlamaCpp, windows: Sequence[Sequence[int]]
) -> dict[tuple[str, str, str], list[float]]:
    """Mean loss of every window, by runner, format of the weights, and format of keys and values."""
    runner = ModelRunner(model)
    generators: dict[tuple[str, str, str], Generator] = {
        (PLAIN, "FP32", "FP32"): Plain(model),
        (PLAIN, "FP8", "FP32"): Plain(decoded(model)),
        (KERNELS, "FP8", "FP32"): Octavo(runner, WINDOW, FP32),
        (REFERENCE, "FP8", "FP8"): Octavo(ModelRunner(model, level="torch"), WINDOW),
        (KERNELS, "FP8", "FP8"): Octavo(runner, WINDOW),
        ("llama.cpp", "Q8_0", "FP16"): peer,
    }
    return {name: [window_loss(generator, window) for window in windows] for name, generator in generators.items()}


def window_loss(generator: Generator, window: Sequence[int]) -> float:
    """Mean loss, in nats, of the tokens of a window but the first."""
    generator.rewind(0)
    logits = generator.logits(window[:-1], every=True)
    return float(token_loss(logits[None], torch.tensor([window[1:]])))


def decoded(model: Llama) -> Llama:
    """Copy of the model with every matrix quantized to FP8 with one scale per row, and dequantized."""
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        if parameter.ndim == 2:
            parameter.data = quantize(parameter.data, E4M3, granularity=PerRow()).dequantize()
    return rounded


def perplexity_lines(losses: Mapping[tuple[str, str, str], list[float]]) -> list[str]:
    """Perplexities compared with FP32, and the difference that the kernels make."""
    full = losses[PLAIN, "FP32", "FP32"]
    rows = [
        [*name, f"{math.exp(statistics.mean(found)):.4f}", "" if found is full else _more(*_paired(found, full))]
        for name, found in losses.items()
    ]
    header = ["runner", "weights", "keys and values", "perplexity", "nats above FP32 (± standard error)"]
    lines = [*markdown_table(header, rows), "", f"{len(full)} windows of {WINDOW} tokens; differences are paired."]
    exactly, redrawn = (KERNELS, "FP8", "FP32"), (KERNELS, "FP8", "FP8")
    lines += [
        "",
        _unchanged(losses[exactly], losses[PLAIN, "FP8", "FP32"], f"FP32 cache, against {PLAIN}", UNCHANGED_NATS),
    ]
    reference = losses[REFERENCE, "FP8", "FP8"]
    bound = STANDARD_ERRORS * _paired(losses[redrawn], reference)[1]
    return [*lines, "", _unchanged(losses[redrawn], reference, f"FP8 cache, against {REFERENCE}", bound)]


def _unchanged(own: Sequence[float], reference: Sequence[float], what: str, bound: float) -> str:
    mean, _ = _paired(own, reference)
    most = max(abs(one - other) for one, other in zip(own, reference, strict=True))
    verdict = "unchanged" if abs(mean) <= bound else "CHANGED"
    return f"{KERNELS}, {what}: {verdict}, {mean:+.1e} nats (bound {bound:.1e}), at most {most:.1e} in a window."


def _more(mean: float, error: float) -> str:
    return f"{mean:+.4f} ± {error:.4f}"


def _paired(found: Sequence[float], than: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences, window by window, and its standard error."""
    gaps = [one - other for one, other in zip(found, than, strict=True)]
    return statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan


def _tokens(run: Callable[[], object], count: int, *bounds: Bound) -> Contestant:
    return Contestant(run, count, "tokens/s", bounds)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB, a token's"


if __name__ == "__main__":
    main()
