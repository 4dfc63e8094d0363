"""Measuring for all benchmarks: rounds (octavo.bench.timing), the machine in a line, tables, and result files."""

import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from octavo.bench.results import markdown_table, result_name, write_result
from octavo.bench.timing import Ratio, interleaved, ratio
from octavo.training.study_facts import processor_name

__all__ = [
    "Ratio",
    "bf16_note",
    "hardware",
    "interleaved",
    "markdown_table",
    "publish",
    "ratio",
    "verdict",
]

RESULTS = Path(__file__).parent / "results"


def verdict(reached: bool, beside: str = "") -> str:
    """Verdict of a bar; ``beside`` is the name of the compared call, which may be a BF16 one that is emulated here."""
    emulated = "bf16" in beside.lower() and "octavo" not in beside and not _has_bf16_instructions()
    return ("met" if reached else "missed") + (", beside emulated BF16" if emulated else "")


def bf16_note() -> str:
    """Note on torch's bfloat16 GEMMs on this CPU."""
    if _has_bf16_instructions():
        return "torch's bfloat16 products use this CPU's BF16 instructions."
    return "This CPU has no BF16 instructions: torch's bfloat16 products are emulated, a GEMM by a scalar loop."


def _has_bf16_instructions() -> bool:
    return torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001


def hardware() -> str:
    """Line with processor, threads, vector instructions, torch's version and the load before the run."""
    instructions = torch.backends.cpu.get_cpu_capability()
    bf16 = "with" if _has_bf16_instructions() else "without"
    load = os.getloadavg()[0]
    return (
        f"{processor_name()}, {torch.get_num_threads()} threads, {instructions} {bf16} BF16 instructions, "
        f"torch {torch.__version__}, load average before the run {load:.1f}"
    )


def publish(theme: str, lines: list[str], *, title: str, machine: str, write: bool, variant: str = "") -> None:
    """Print a result, and write ``results/<theme>_<hardware>_<date>.md`` with the command line as it was given.

    Args:
        theme: name of the benchmark's module.
        lines: lines of the result, in Markdown.
        title: title of the file.
        machine: line of :func:`hardware`.
        write: whether to write the file.
        variant: suffix of the theme in the file's name.
    """
    console = Console()
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if write:
        today = datetime.now(tz=UTC).strftime("%Y-%m-%d")
        command = shlex.join(["python", "-m", f"benchmarks.{theme}", *sys.argv[1:]])
        head = [f"# {title}", "", f"`{command}`, {today}", "", machine, ""]
        processor = f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}"
        name = result_name(f"{theme}_{variant}" if variant else theme, processor, today)
        path = write_result(RESULTS, name, {".md": "\n".join([*head, *lines]) + "\n"})
        console.print(f"written to {path}.md", markup=False, soft_wrap=True)
