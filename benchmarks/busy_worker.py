"""Worker process of benchmarks.busy, which times calls with one build of the native kernels.

    python -m benchmarks.busy_worker [FILE]

An input line holds a number of threads and the name of a call; the output line holds the call's seconds. octavo is
imported late, so that FILE, another build's extension, can replace the installed one.
"""

import importlib.util
import sys
import time
from collections.abc import Callable

import torch

ONE_ROW, CAST, TOKEN, STEP = KINDS = ("one row", "cast", "decode step", "training step")
SETTLE_S, TIMED_S = 0.3, 0.6
WIDTH, MATRICES = 4096, 8
PROMPT = 64  # tokens


def main() -> None:
    """Answer until the input ends."""
    if len(sys.argv) > 1:
        replace_extension(sys.argv[1])
    calls = {ONE_ROW: one_row(), CAST: cast(), TOKEN: token(), STEP: training_step()}
    for line in sys.stdin:
        threads, kind = line.strip().split(" ", 1)
        torch.set_num_threads(int(threads))
        repeat(calls[kind], SETTLE_S)
        print(repeat(calls[kind], TIMED_S), flush=True)


def replace_extension(path: str) -> None:
    """Make octavo, which is not imported yet, load another extension."""
    name = "octavo.kernels._native"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def repeat(call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call, repeated for some."""
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        call()
        count += 1
    return (time.perf_counter() - started) / count


def one_row() -> Callable[[], object]:
    """Products of a row with as many matrices as no cache holds."""
    from octavo import E4M3, PerRow, quantize, scaled_mm

    x = quantize(torch.randn(1, WIDTH), E4M3, granularity=PerRow())
    matrices = [quantize(torch.randn(WIDTH, WIDTH), E4M3, granularity=PerRow()) for _ in range(MATRICES)]
    return lambda: [scaled_mm(x, matrix, out_dtype=torch.float32) for matrix in matrices]


def cast() -> Callable[[], object]:
    """A rowwise cast."""
    from octavo import E4M3, PerRow, quantize

    x = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)
    return lambda: quantize(x, E4M3, granularity=PerRow())


def token() -> Callable[[], object]:
    """The likeliest token after a prompt; random weights take as long as trained ones."""
    from benchmarks.generators import Octavo
    from octavo.inference import ModelRunner
    from octavo.models import Llama, LlamaConfig

    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        max_positions=2 * PROMPT,
    )
    generator = Octavo(ModelRunner(Llama(shape, seed=0)), 2 * PROMPT)
    generator.logits(range(PROMPT))

    def step() -> int:
        generator.rewind(PROMPT)
        return int(generator.logits([1]).argmax())

    return step


def training_step() -> Callable[[], object]:
    """Forward and backward of the demo's model."""
    from octavo.models import Llama
    from octavo.training.config import demo_config
    from octavo.training.evaluate import token_loss
    from octavo.training.precision import apply_recipe, surroundings

    config = demo_config(quick=False).with_training(recipe="tensorwise")
    training = config.training
    model = Llama(config.model.llama(vocab_size=config.data.vocab_size, max_positions=training.context), seed=0)
    apply_recipe(model, training)
    size, context = (training.batch_size, training.context), surroundings(training, torch.device("cpu"))
    tokens, targets = (torch.randint(model.config.vocab_size, size) for _ in range(2))

    def step() -> None:
        model.zero_grad()
        with context:
            loss = token_loss(model(tokens), targets)
        loss.backward()

    return step


if __name__ == "__main__":
    main()
