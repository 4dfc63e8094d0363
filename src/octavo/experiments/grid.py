"""A study's grid: variants x seeds x factors of learning rate and warm-up, run by any number of processes.

    out_dir/
      config.toml bars.toml          the configuration of all runs and the bars, written first
      cells/<name>/                  a run each (:mod:`octavo.experiments.cells`)
      results.jsonl results.parquet  a row for each finished cell

Processes that are started on one folder share its cells: each takes the next free one, whose lock file it holds until
the cell is finished. The operating system releases the lock of a process that dies, so a killed grid goes on where it
was: finished cells are never run again, and an interrupted run is resumed from its last checkpoint.
"""

import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.experiments.cells import Cell, CellResult, Variant, finished_result, run_cell
from octavo.experiments.run_measures import OnPhase
from octavo.text.tokens import TokenData
from octavo.training.config import RunConfig
from octavo.training.memory import fitting_in_memory
from octavo.training.threads import using_threads

__all__ = ["CELLS", "Grid", "finished_cells", "locked", "run_grid"]

CELLS = "cells"
POLL_SECONDS = 2.0  # between looks at cells that other processes run
NOISE_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every combination of its variants, seeds and factors.

    Attributes:
        variants: baseline first.
        seeds: seeds of weights and batches.
        lr_factors: factors of the configuration's learning rates.
        warmup_factors: factors of its warm-up.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    lr_factors: tuple[float, ...] = (1.0,)
    warmup_factors: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        for what, values in (
            ("variants", names),
            ("seeds", self.seeds),
            ("learning rate factors", self.lr_factors),
            ("warm-up factors", self.warmup_factors),
        ):
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"a grid needs {what}, each once; got {', '.join(map(str, values)) or 'none'}")
        for what, factors in (("learning rate", self.lr_factors), ("warm-up", self.warmup_factors)):
            if any(not 0 < factor < 1000 for factor in factors):
                raise ConfigError(f"factors of the {what} must be above 0 and below 1000, not {list(factors)}")
            if len({f"{factor:g}" for factor in factors}) < len(factors):
                raise ConfigError(f"factors of the {what} must differ in their first six digits, not {list(factors)}")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells: every variant of one seed before the next seed, so that pairs are complete early."""
        combinations = itertools.product(self.seeds, self.lr_factors, self.warmup_factors, self.variants)
        return tuple(
            Cell(variant=variant, seed=seed, lr=lr, warmup=warmup) for seed, lr, warmup, variant in combinations
        )


def run_grid(
    grid: Grid,
    base: RunConfig,
    out_dir: str | Path,
    *,
    data: TokenData,
    wait: bool = True,
    on_phase: OnPhase = lambda _: None,
    on_cell: Callable[[CellResult], None] = lambda _: None,
) -> tuple[CellResult, ...]:
    """Run the cells that no other process has finished or runs, and return the results of all that are finished.

    Args:
        grid: the cells.
        base: configuration of the runs, which each cell changes.
        out_dir: the study's folder, the same in all processes.
        data: the token files.
        wait: wait for the cells that other processes run; one of them that dies is run here.
        on_phase: called as the phases of a cell progress.
        on_cell: called with each result as it is finished or found.

    Raises:
        ConfigError: a cell's configuration is invalid, or its folder holds another run.
        StoppedBySignal: a signal stopped a run; it has saved a checkpoint, and the same call resumes it.
    """
    folder = Path(out_dir) / CELLS
    folder.mkdir(parents=True, exist_ok=True)
    for cell in grid.cells:  # all are checked before the first is run
        cell.config(base)
        finished_result(cell, folder / cell.name, base, data)
    results: dict[str, CellResult] = {}

    def take(cell: Cell) -> CellResult | None:
        """The cell's result, run here if no other process has or does; None if one is running it."""
        place = folder / cell.name
        if known := finished_result(cell, place, base, data):
            return known
        with locked(folder / f"{cell.name}.lock") as ours:
            if not ours:
                return None
            # Another process may have finished it between the look and the lock.
            return finished_result(cell, place, base, data) or run_cell(
                cell, place, base, data, noise_batches=NOISE_BATCHES, report=on_phase
            )

    with using_threads(base.training.threads), fitting_in_memory(base.training):
        while True:
            for cell in grid.cells:
                if cell.name not in results and (result := take(cell)):
                    results[cell.name] = result
                    on_cell(result)
            if not wait or len(results) == len(grid.cells):
                break
            time.sleep(POLL_SECONDS)
    return tuple(results[cell.name] for cell in grid.cells if cell.name in results)


def finished_cells(grid: Grid, base: RunConfig, out_dir: str | Path, data: TokenData) -> tuple[CellResult, ...]:
    """Results of the cells that are finished."""
    folder = Path(out_dir) / CELLS
    found = (finished_result(cell, folder / cell.name, base, data) for cell in grid.cells)
    return tuple(result for result in found if result is not None)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a file; yields False, without ``wait``, while another process holds it."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
