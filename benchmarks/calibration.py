"""Time of ``octavo.calibrate`` on SmolLM2-135M, against an evaluation of the same text.

    python -m benchmarks.calibration [--windows 4] [--rounds 5] [--no-write]

A calibration reads windows, then measures the weights and selects the scales once. Both are timed: reading windows of
512 tokens of the built-in corpus, one per batch, in FP32, with histograms of every layer's input, against an evaluation
of the same windows (forward passes and the loss of every token); and whole calibrations of one window of 8 tokens,
whose time is almost only that of the second part. The bar applies to both together for the command's 128 samples. The
bytes are those of the observers between two batches, which do not depend on the number of batches.

Bar: at least 0.7 times the tokens/s of plain evaluation for every method.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import smollm2
from benchmarks.measure import hardware, interleaved, markdown_table, publish, ratio, verdict
from octavo.convert import choose_layers
from octavo.language_model import LanguageModel
from octavo.quantization import calibrate, text_windows
from octavo.quantization.calibration.observers import observe
from octavo.quantization.calibration.ranges import Method
from octavo.training.evaluate import token_loss

BAR, WINDOW, SAMPLES, FEW = 0.7, 512, 128, 8
PLAIN, COUNTED = "evaluation", "inputs counted"


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine, model = hardware(), smollm2.load()
    batches = text_windows(model, "builtin", "train", count=arguments.windows, length=WINDOW).split(1)
    seconds = interleaved(contestants(model, batches), rounds=arguments.rounds)
    lines = lines_of(seconds, kept_bytes(model, batches[:2]), windows=arguments.windows)
    publish("calibration", lines, title="Time of a calibration", machine=machine, write=not arguments.no_write)


def contestants(model: LanguageModel, batches: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """Timed calls: an evaluation, one with histograms of the inputs, and a short calibration with each method."""
    layers, _ = choose_layers(model.model)
    few = batches[0][:, :FEW]

    @torch.no_grad()
    def evaluate() -> float:
        return sum(token_loss(model.logits(batch)[:, :-1], batch[:, 1:]).item() for batch in batches)

    def once(method: Method) -> Callable[[], object]:
        return lambda: calibrate(model, [few], method=method)

    return {PLAIN: evaluate, COUNTED: lambda: observe(model, batches, layers), **{str(m): once(m) for m in Method}}


def kept_bytes(model: LanguageModel, batches: tuple[Tensor, ...]) -> list[int]:
    """Bytes that the observers hold after one batch and after all of them: the same."""
    layers, _ = choose_layers(model.model)
    sizes = []
    for some in (batches[:1], batches):
        observations = observe(model, some, layers)
        tensors = [tensor for one in observations.inputs.values() for tensor in (one.counts.amax, one.counts.counts)]
        sizes.append(sum(tensor.nbytes for tensor in tensors))
    return sizes


def lines_of(seconds: dict[str, list[float]], kept: list[int], *, windows: int) -> list[str]:
    """Lines of the result."""
    columns = ["method", "reading", "once, s", f"tokens/s of {SAMPLES} samples ÷ evaluation's", "verdict"]
    rows = []
    reading = ratio(seconds, PLAIN, COUNTED)
    for method in map(str, Method):
        total = {
            PLAIN: [SAMPLES / windows * each for each in seconds[PLAIN]],
            method: [
                SAMPLES / windows * counted + once
                for counted, once in zip(seconds[COUNTED], seconds[method], strict=True)
            ],
        }
        speed = ratio(total, PLAIN, method)
        once_only = f"{sorted(seconds[method])[len(seconds[method]) // 2]:.1f}"
        rows.append([method, str(reading), once_only, str(speed), verdict(speed.median >= BAR)])
    tokens_per_second = WINDOW * windows / sorted(seconds[PLAIN])[len(seconds[PLAIN]) // 2]
    note = (
        f"Median of {len(seconds[PLAIN])} interleaved rounds (quartiles) of {windows} windows; the evaluation reads "
        f"{tokens_per_second:,.0f} tokens/s. Bar: {BAR:g} times that. The observers hold {kept[0] / 2**20:.1f} MiB "
        f"after one batch and {kept[-1] / 2**20:.1f} MiB after more."
    )
    return [*markdown_table(columns, rows), "", note]


if __name__ == "__main__":
    main()
