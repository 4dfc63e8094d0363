"""``octavo doctor bisect RUN``: find the layers that account for a run's loss gap to BF16."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options
from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.progress import open_display
from octavo.experiments import Bisection, origin_of
from octavo.experiments import bisect as find_layers
from octavo.models.sources import check_run_folder

__all__ = ["bisect"]


def bisect(
    *,
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder; the search starts at its newest checkpoint.")
    ],
    steps: Annotated[int, typer.Option(help="Updates per short run; the second half is measured.")] = 40,
    orders: Annotated[int, typer.Option(help="Batch orders per measurement, to tell a gap from chance.")] = 2,
    as_json: options.Json = False,
) -> None:
    """Find the layers that cost a run its accuracy, by keeping some in BF16 for a few steps."""
    check_run_folder(run_dir)
    origin = origin_of(run_dir)
    with open_display() as display:
        advance = display.phase(f"short runs of {steps} steps", None)
        bisection = find_layers(
            origin, steps=steps, orders=orders, on_run=lambda count: advance(count, f"{count} runs")
        )
    if as_json:
        print_json({"run": str(run_dir), **_record(bisection)})
        return
    if bisection.parts:
        columns = ["in BF16", "share of the gap", "nats", "±"]
        print_table("What accounts for the gap to BF16", columns, _rows(bisection))
    print_lines(*_sentences(bisection))


def _record(bisection: Bisection) -> dict[str, Any]:
    record = asdict(bisection) | {"is_measurable": bisection.is_measurable}
    return {**record, "overrides": _overrides(bisection)}


def _overrides(bisection: Bisection) -> dict[str, str]:
    return {path: "bf16" for part in bisection.parts for path in part.layers}


def _rows(bisection: Bisection) -> Iterator[list[str]]:
    for part in bisection.parts:
        effect = part.effect
        yield ["\n".join(part.layers), f"{part.share:.0%}", number(effect.nats, 3), number(effect.error, 2)]
    yield [f"all {bisection.layers} layers", "100%", number(bisection.gap.nats, 3), number(bisection.gap.error, 2)]


def _sentences(bisection: Bisection) -> Iterator[str]:
    orders, noise_floor, gap = len(bisection.gap.orders), number(bisection.floor, 2), number(bisection.gap.nats, 3)
    yield (
        f"Measured by {bisection.runs} runs of {bisection.steps} steps from step {bisection.first_step}, with {orders} "
        f"batch orders; less than {noise_floor} nats is noise."
    )
    if bisection.is_measurable:
        pairs = ", ".join(f'"{path}" = "{recipe}"' for path, recipe in _overrides(bisection).items())
        yield f"To keep them in BF16, set overrides = {{ {pairs} }} in the section [training] of the configuration."
    else:
        yield f"BF16 everywhere saves {gap} nats, which is noise; more --steps or --orders resolve smaller gaps."
