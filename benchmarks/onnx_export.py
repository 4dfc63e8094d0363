"""A language model as ONNX graphs: agreement with octavo's emulation, and size.

    python -m benchmarks.onnx_export [--run RUN] [--recipes static,rowwise,weight_only] [--tokens 64] [--no-write]

The model is SmolLM2-135M, or a trained run of octavo's.

Each recipe is exported in FP32 and compared; the first is also exported in FP16 for its size, since recipes differ only
in a few scales. onnxruntime and ONNX's reference run all graphs, as in every export. Greedy text is that of onnxruntime
against that of the emulation.

| bar                          | is                                                                               |
|------------------------------|----------------------------------------------------------------------------------|
| logits, with the same codes  | within 1e-3 (‖difference‖ / ‖torch's‖)                                           |
| logits, free-running         | within 1e-3 too; for scale, the emulation against itself with GEMM results       |
|                              | changed by one FP32 digit                                                        |
| greedy text                  | the same 64 tokens: with the same codes, at each place of the emulation's text   |
| bytes                        | at most 0.62 of BF16's, the first recipe's, head and embedding in FP16           |
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

import octavo
from benchmarks import smollm2
from benchmarks.measure import hardware, markdown_table, publish, verdict
from octavo.errors import DataError
from octavo.export.lockstep import relative_error
from octavo.language_model import LanguageModel, load_language_model
from octavo.onnx import OnnxOptions, OnnxReport, export_onnx
from octavo.onnx.checks import check_engines
from octavo.onnx.graph import Graph, graph_of_decoder
from octavo.quantization import Calibration, calibrate, text_windows
from octavo.text.sources import LIBRARY_SOURCES

MOST_ERROR, MOST_BYTES = 1e-3, 0.62
PROMPT = "The capital of France is"
HEADER = [
    "recipe",
    "casts",
    "wrong codes",
    "error, same codes",
    "free-running",
    "emulation, one digit off",
    "choices, same codes",
    "greedy text, free-running",
]
Logits = Callable[[Tensor], Tensor]


def main() -> None:
    """Export, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run of octavo train or demo, instead of SmolLM2-135M")
    parser.add_argument("--recipes", default="static,rowwise,weight_only")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="windows that static is calibrated on")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine, console = hardware(), Console()
    try:
        model = load_language_model(arguments.run or smollm2.model_path())
    except DataError as error:
        parser.exit(2, f"{error}\n")
    length = min(256, model.context)
    text = text_windows(model, LIBRARY_SOURCES, "train", count=arguments.samples, length=length)
    calibration = calibrate(model, [window[None] for window in text])

    def say(said: str) -> None:
        console.print(said, style="dim", markup=False)

    names = arguments.recipes.split(",")
    rows = [measured(in_fp8(model, recipe, calibration), recipe, arguments.tokens, say) for recipe in names]
    lines = [*markdown_table(HEADER, rows), "", weighed(in_fp8(model, names[0], calibration), names[0], say)]
    publish(
        "onnx_export",
        lines,
        title=f"{Path(arguments.run or 'SmolLM2-135M').name} as ONNX graphs, against octavo's emulation",
        machine=machine,
        write=not arguments.no_write,
        variant="run" if arguments.run else "",
    )


def in_fp8(model: LanguageModel, recipe: str, calibration: Calibration) -> LanguageModel:
    """A copy whose linears run the recipe."""
    converted = replace(model, model=copy.deepcopy(model.model))
    if recipe == "static":
        calibration.apply(converted)
    else:
        octavo.convert(converted.model, recipe)
    return converted


def exported(model: LanguageModel, folder: Path, recipe: str, dtype: str, say: Callable[[str], None]) -> OnnxReport:
    """Export the graph into a folder; print a line with the time of each step."""
    start = time.perf_counter()

    def step(name: str) -> None:
        say(f"{recipe} {dtype}, {time.perf_counter() - start:.0f} s: {name}")

    report = export_onnx(model, folder, options=OnnxOptions(dtype=dtype), on_step=step)
    step(f"done\n{report}")
    return report


def weighed(model: LanguageModel, recipe: str, say: Callable[[str], None]) -> str:
    """Line on the size of the file in FP16."""
    with tempfile.TemporaryDirectory() as scratch:
        report = exported(model, Path(scratch) / "fp16", recipe, "fp16", say)
    share = report.file_bytes / (2 * sum(each.numel() for each in model.model.parameters()))
    size = f"{report.file_bytes / 1e6:.1f} MB in FP16, {share:.3f} of BF16's"
    return f"- {recipe}: {size}: {verdict(share <= MOST_BYTES)}"


def measured(model: LanguageModel, recipe: str, tokens: int, say: Callable[[str], None]) -> list[str]:
    """Row of a recipe."""
    with tempfile.TemporaryDirectory() as scratch:
        wide = exported(model, Path(scratch) / "fp32", recipe, "fp32", say)
        prompt, tokens_emulated = greedy(model.logits, model, tokens)
        text = torch.tensor([prompt + tokens_emulated[:-1]])
        lockstep = check_engines(_graph(model), wide.folder / "model.onnx", (text,))[0]
        _, tokens_onnxruntime = greedy(_onnxruntime(wide), model, tokens)
    worst = max(wide.engines, key=lambda each: each.error)
    free = max(each.free_error for each in wide.engines)
    same = sum(a == b for a, b in zip(tokens_emulated, tokens_onnxruntime, strict=True))
    return [
        recipe,
        str(worst.casts),
        str(sum(each.wrong_codes for each in wide.engines)),
        f"{worst.error:.1e} ({verdict(worst.error <= MOST_ERROR)})",
        f"{free:.1e} ({verdict(free <= MOST_ERROR)})",
        f"{one_digit_off(model):.1e}",
        f"{lockstep.same_choices} of {lockstep.choices} ({verdict(lockstep.same_choices == lockstep.choices)})",
        f"{same} of {tokens}",
    ]


@torch.no_grad()
def one_digit_off(model: LanguageModel) -> float:
    """The emulation against itself with every linear layer's outputs moved by FP32's last digit, at random.

    Another order of additions moves sums by as much or more.
    """
    tokens = torch.randint(1000, (3, 7), generator=torch.Generator().manual_seed(0))
    moved, generator = copy.deepcopy(model.model), torch.Generator().manual_seed(1)

    def move(_module: torch.nn.Module, _inputs: object, output: Tensor) -> Tensor:
        signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
        return output * (1 + signs * torch.finfo(torch.float32).eps)

    for module in moved.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(move)
    return relative_error(replace(model, model=moved).logits(tokens), model.logits(tokens))


@torch.no_grad()
def greedy(logits: Logits, model: LanguageModel, count: int) -> tuple[list[int], list[int]]:
    """The prompt, and the most likely token again and again."""
    ids = list(model.tokenizer.encode(PROMPT).ids)
    start = len(ids)
    for _ in range(count):
        ids.append(int(logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[:start], ids[start:]


def _graph(model: LanguageModel) -> Graph:
    return graph_of_decoder(model, torch.float32, has_cache=False, attention=None)


def _onnxruntime(report: OnnxReport) -> Logits:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    path = report.folder / "model.onnx"
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda tokens: torch.from_numpy(session.run(["logits"], {"input_ids": tokens.numpy()})[0])


if __name__ == "__main__":
    main()
