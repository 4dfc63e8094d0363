"""All checkpoint formats on a real model and on the demo's: written, read by another library, compared.

    python -m benchmarks.export [--run runs/demo/tensorwise] [--cases "hf-fp8;octavo"] [--no-write]
    python -m benchmarks.export --mix FILE

The models are SmolLM2-135M and, if given, a trained run of octavo. Errors are ‖difference‖ / ‖logits‖ in FP32 against
octavo's emulation: in lockstep, and free-running, where a cast can turn a difference in the last digit of a sum into
another code (``octavo.export.lockstep``). With --mix, SmolLM2-135M is written with a mix of ``octavo sensitivity``, in
the one format that supports it. Bytes are those of the weights' files over BF16's; the head stays in BF16.

Bars: an error of at most 1e-3 in lockstep, of the logits and of the inputs of each layer; the same 64 tokens; at most
0.62 of BF16's bytes. There is no bar for free-running.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import smollm2
from benchmarks.measure import hardware, markdown_table, publish, verdict
from octavo.errors import DataError
from octavo.export.checkpoint_writer import GREEDY, SavedCheckpoint, save_quantized
from octavo.export.sources import ConversionOptions, load_source
from octavo.export.verification import TOLERANCE
from octavo.language_model import load_language_model
from octavo.quantization import calibrate, text_windows
from octavo.text.sources import BUILTIN

SAMPLES, LENGTH = 8, 256
MOST_BYTES = 0.62  # of BF16's
CASES = {
    "compressed-tensors": ("compressed-tensors", None, False),
    "compressed-tensors, weights only": ("compressed-tensors", "weight_only", False),
    "compressed-tensors, static, KV cache": ("compressed-tensors", None, True),
    "hf-fp8": ("hf-fp8", None, False),
    "modelopt, KV cache": ("modelopt", None, True),
    "octavo": ("octavo", "mxfp8", False),
}
COLUMNS = ("model", "format", "read by", "logits, lockstep", "worst layer", "greedy alike", "free", "bytes / BF16")


def main() -> None:
    """Write, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run of octavo train or demo, to be exported too")
    parser.add_argument("--cases", default="", help=f"some of {'; '.join(CASES)}, by semicolons; all by default")
    parser.add_argument("--mix", type=Path, help="a mix of octavo sensitivity, which is measured alone")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine, write = hardware(), not arguments.no_write
    if arguments.mix is not None:
        lines = mixed(arguments.mix)
        publish("export", lines, title="A mix, read back", machine=machine, write=write, variant="mix")
        return
    try:
        sources = {"SmolLM2-135M": str(smollm2.model_path())} | _runs(arguments.run)
    except DataError as error:
        parser.exit(2, f"{error}\n")
    cases = list(filter(None, arguments.cases.split(";"))) or list(CASES)
    lines = markdown_table(COLUMNS, rows(sources, cases))
    publish("export", lines, title="Checkpoints, read back", machine=machine, write=write)


def rows(sources: Mapping[str, str], cases: Sequence[str]) -> Iterator[list[str]]:
    """Yield a row for each model and case, and print it."""
    console = Console(stderr=True)
    for name, source in sources.items():
        with tempfile.TemporaryDirectory() as scratch:
            scales = _calibrated(source, Path(scratch)) if any(CASES[case][2] for case in cases) else None
            for case in cases:
                fmt, recipe, is_static = CASES[case]
                saved = measured(
                    source, fmt, ConversionOptions(recipe=recipe, calibration=scales if is_static else None)
                )
                cells = row(name, case, saved)
                console.print(" | ".join(cells), markup=False, soft_wrap=True)
                yield cells


def mixed(mix: Path) -> list[str]:
    """Table for SmolLM2-135M with a mix, and its bytes."""
    saved = measured(str(smollm2.model_path()), "octavo", ConversionOptions(mix=mix))
    table = markdown_table(COLUMNS, [row("SmolLM2-135M", "octavo, a mix", saved)])
    return [*table, "", f"{saved.nbytes:,} bytes of weights."]


def measured(source: str, fmt: str, request: ConversionOptions) -> SavedCheckpoint:
    """Write one case into a temporary folder, with its verification."""
    ready = load_source(source, fmt, request)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        return save_quantized(ready.language_model, folder, format=fmt, kv_scales=ready.kv_scales, tables=ready.tables)


def _runs(run: str | None) -> dict[str, str]:
    return {} if run is None else {f"run {Path(run).name}": run}


def _calibrated(source: str, folder: Path) -> Path:
    model = load_language_model(source)
    length = min(LENGTH, model.context)
    windows = text_windows(model, BUILTIN, "train", count=SAMPLES, length=length)
    calibrate(model, windows.split(1), kv_cache=True).save(folder / "scales")
    return folder / "scales"


def row(model: str, case: str, saved: SavedCheckpoint) -> list[str]:
    """Row of a case: its figures, each with the verdict of its bar."""
    agreement = saved.agreement
    assert agreement is not None
    share = saved.nbytes / saved.bf16_nbytes
    same = agreement.greedy_equal == agreement.greedy_tokens >= GREEDY
    return [
        model,
        case,
        saved.reader,
        f"{agreement.logits_error:.1e} ({verdict(agreement.logits_error <= TOLERANCE)})",
        f"{agreement.worst_error:.1e} ({verdict(agreement.worst_error <= TOLERANCE)})",
        f"{agreement.greedy_equal} of {agreement.greedy_tokens} ({verdict(same)})",
        f"{agreement.free_error:.1e}, {agreement.free_equal} of {agreement.greedy_tokens}",
        f"{share:.3f} ({verdict(share <= MOST_BYTES)})",
    ]


if __name__ == "__main__":
    main()
