"""Time alternatives side by side, and write down what was found.

Machines are shared and noisy, so nothing is timed alone: each round runs every contestant once, and what counts is the
median of the per-round ratios to one of them, with their quartiles.
"""

import gc
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from octavo.training.facts import processor_name

__all__ = ["Ratio", "bf16_note", "hardware", "interleaved", "ratio", "verdict", "write_result"]

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the per-round ratios of two contestants' times, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def interleaved(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of every contestant in every round; a round runs each once, in turn."""
    for _ in range(warmup):
        for run in contestants.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in contestants.items():
                started = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - started)
            gc.collect()
    finally:
        gc.enable()
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> Ratio:
    """How many times as long ``name`` takes as ``base``, round by round."""
    ratios = sorted(own / other for own, other in zip(seconds[name], seconds[base], strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(ratios), low, high)


def verdict(reached: bool, beside: str = "") -> str:
    """What a bar's row says; the name of what stands beside tells whether that had to emulate BF16."""
    emulated = "bf16" in beside.lower() and "octavo" not in beside and not _has_bf16_instructions()
    return ("met" if reached else "missed") + (", beside emulated BF16" if emulated else "")


def bf16_note() -> str:
    """What torch's bfloat16 products are on this CPU."""
    if _has_bf16_instructions():
        return "torch's bfloat16 products use this CPU's BF16 instructions."
    return "This CPU has no BF16 instructions: torch's bfloat16 products are emulated, a GEMM by a scalar loop."


def _has_bf16_instructions() -> bool:
    return torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001


def hardware() -> str:
    """One line: processor, threads, vector instructions, versions, load before the run."""
    instructions = torch.backends.cpu.get_cpu_capability()
    bf16 = "with" if _has_bf16_instructions() else "without"
    load = os.getloadavg()[0]
    return (
        f"{processor_name()}, {torch.get_num_threads()} threads, {instructions} {bf16} BF16 instructions, "
        f"torch {torch.__version__}, load average before the run {load:.1f}"
    )


def write_result(theme: str, lines: list[str], *, title: str, command: str, machine: str) -> Path:
    """Write ``results/<theme>_<hardware>_<date>.md`` and return its path."""
    today = datetime.now(tz=UTC).strftime("%Y-%m-%d")
    name = f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}".lower()
    short = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    path = RESULTS / f"{theme}_{short}_{today}.md"
    head = [f"# {title}", "", f"`{command}`, {today}", "", machine, ""]
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return path
