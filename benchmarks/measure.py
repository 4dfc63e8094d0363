"""What a CPU's measurements share: the machine in a line, and a result's file. octavo.bench.rounds takes the times."""

import os
from datetime import UTC, datetime
from pathlib import Path

import torch

from octavo.bench.results import result_name
from octavo.bench.rounds import Ratio, interleaved, ratio
from octavo.training.facts import processor_name

__all__ = ["Ratio", "hardware", "interleaved", "ratio", "write_result"]

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """One line: processor, threads, vector instructions, versions, load before the run."""
    instructions = torch.backends.cpu.get_cpu_capability()
    bf16 = "with" if torch.cpu._is_avx512_bf16_supported() else "without"  # noqa: SLF001
    load = os.getloadavg()[0]
    return (
        f"{processor_name()}, {torch.get_num_threads()} threads, {instructions} {bf16} BF16 instructions, "
        f"torch {torch.__version__}, load average before the run {load:.1f}"
    )


def write_result(theme: str, lines: list[str], *, title: str, command: str, machine: str) -> Path:
    """Write ``results/<theme>_<hardware>_<date>.md`` and return its path."""
    today = datetime.now(tz=UTC).strftime("%Y-%m-%d")
    name = f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}"
    path = RESULTS / f"{result_name(theme, name, today)}.md"
    head = [f"# {title}", "", f"`{command}`, {today}", "", machine, ""]
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return path
