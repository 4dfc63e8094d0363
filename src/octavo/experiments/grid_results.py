"""Results of a grid as rows of JSON Lines and Parquet: one row a finished cell, curves and window losses in it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.experiments.cells import CellResult
from octavo.files import write_atomically

__all__ = ["RESULTS", "result_row", "write_results"]

RESULTS = "results.jsonl"
PARQUET = "results.parquet"


def result_row(result: CellResult) -> dict[str, Any]:
    """One cell as plain values: nats, steps, seconds, bytes."""
    cell, run = result.cell, result.run
    return {
        "variant": cell.variant.name,
        "recipe": cell.variant.recipe,
        "options": json.dumps(dict(cell.variant.options), sort_keys=True),
        "seed": cell.seed,
        "lr_factor": cell.lr,
        "warmup_factor": cell.warmup,
        "steps": run.steps,
        "failed_at": result.failed_at,
        "nats": run.nats if run.window_nats else None,
        "gradient_variance": run.gradient_variance,
        "gradient_error": run.gradient_error,
        "noise_scale": result.noise_scale,
        "tokens_per_second": run.tokens_per_second,
        "peak_memory_bytes": run.peak_memory_bytes,
        "threads": list(run.threads),
        "train_steps": [step for step, _ in run.train_curve],
        "train_nats": [nats for _, nats in run.train_curve],
        "validation_steps": [step for step, _ in run.validation_curve],
        "validation_nats": [nats for _, nats in run.validation_curve],
        "window_nats": list(run.window_nats),
    }


def write_results(results: Sequence[CellResult], folder: Path) -> tuple[str, ...]:
    """Write results.jsonl, and results.parquet if pyarrow is installed; returns the names that were written."""
    rows = [result_row(result) for result in results]
    write_atomically(folder / RESULTS, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return (RESULTS,)
    with pa.BufferOutputStream() as buffer:
        parquet.write_table(pa.Table.from_pylist(rows), buffer)
        write_atomically(folder / PARQUET, buffer.getvalue().to_pybytes())
    return RESULTS, PARQUET
