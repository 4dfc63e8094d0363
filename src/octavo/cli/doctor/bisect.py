"""``octavo doctor bisect RUN``: which layers account for a run's loss gap to BF16."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.progress import open_display
from octavo.experiments import Bisection, origin_of
from octavo.experiments import bisect as find_layers
from octavo.models.sources import check_is_run

__all__ = ["bisect"]


def bisect(
    *,
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; its newest checkpoint is used.")],
    steps: Annotated[int, typer.Option(help="Updates of each short run; the second half counts.")] = 40,
    orders: Annotated[int, typer.Option(help="Orders of the batches, which tell a gap from chance.")] = 2,
    as_json: options.Json = False,
) -> None:
    """Keep some layers in BF16 for a few steps, to find those that cost a run its accuracy."""
    check_is_run(run_dir)
    origin = origin_of(run_dir)
    with open_display() as display:
        advance = display.phase(f"short runs of {steps} steps", None)
        found = find_layers(origin, steps=steps, orders=orders, on_run=lambda made: advance(made, f"{made} runs"))
    if as_json:
        print_json({"run": str(run_dir), **_record(found)})
        return
    if found.parts:
        columns = ["in BF16", "share of the gap", "nats", "±"]
        print_table("What accounts for the gap to BF16", columns, _rows(found))
    stdout().print("\n".join(_sentences(found)), markup=False, soft_wrap=True)


def _record(found: Bisection) -> dict[str, Any]:
    record = asdict(found) | {"is_measurable": found.is_measurable}
    return {**record, "overrides": _overrides(found)}


def _overrides(found: Bisection) -> dict[str, str]:
    return {path: "bf16" for part in found.parts for path in part.layers}


def _rows(found: Bisection) -> Iterator[list[str]]:
    for part in found.parts:
        effect = part.effect
        yield ["\n".join(part.layers), f"{part.share:.0%}", number(effect.nats, 3), number(effect.error, 2)]
    yield [f"all {found.layers} layers", "100%", number(found.gap.nats, 3), number(found.gap.error, 2)]


def _sentences(found: Bisection) -> Iterator[str]:
    orders, least, gap = len(found.gap.orders), number(found.floor, 2), number(found.gap.nats, 3)
    yield (
        f"Measured by {found.runs} runs of {found.steps} steps from step {found.first_step}, under {orders} orders of "
        f"the batches; less than {least} nats is noise."
    )
    if found.is_measurable:
        pairs = ", ".join(f'"{path}" = "{recipe}"' for path, recipe in _overrides(found).items())
        yield f"To keep them in BF16: overrides = {{ {pairs} }} in the section [training] of the configuration."
    else:
        yield f"BF16 everywhere saves {gap} nats, which is noise; more --steps or --orders see smaller gaps."
