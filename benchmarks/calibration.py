"""What calibrating costs: SmolLM2-135M read by ``octavo.calibrate`` beside the same text read by the model alone.

    python -m benchmarks.calibration [--windows 4] [--rounds 5] [--no-write]

A calibration reads windows and then, once, measures the weights and chooses the scales. Both are timed: reading windows
of 512 tokens of the built-in corpus, one a batch, in FP32, with every layer's input counted, beside an evaluation of
the same windows (forward passes and the loss of every token); and whole calibrations of one window of 8 tokens, which
are nearly all of what is done once. What counts is both together for the command's 128 samples. Bytes are those that
stay between two batches: of the observers alone, whatever was read.

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
    publish("calibration", lines, title="What calibrating costs", machine=machine, write=not arguments.no_write)


def contestants(model: LanguageModel, batches: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """An evaluation of the batches, the same with every input counted, and what each method does once."""
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
    found = []
    for given in (batches[:1], batches):
        seen = observe(model, given, layers)
        tensors = [tensor for one in seen.inputs.values() for tensor in (one.counts.amax, one.counts.counts)]
        found.append(sum(tensor.nbytes for tensor in tensors))
    return found


def lines_of(seconds: dict[str, list[float]], kept: list[int], *, windows: int) -> list[str]:
    """The result's text."""
    columns = ["method", "reading", "once, s", f"tokens/s of {SAMPLES} samples ÷ evaluation's", "verdict"]
    rows = []
    reading = ratio(seconds, PLAIN, COUNTED)
    for method in map(str, Method):
        whole = {
            PLAIN: [SAMPLES / windows * each for each in seconds[PLAIN]],
            method: [
                SAMPLES / windows * counted + once
                for counted, once in zip(seconds[COUNTED], seconds[method], strict=True)
            ],
        }
        speed = ratio(whole, PLAIN, method)
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
