"""One of several ranks that share layers by tensor parallelism: ``python -m tests.contract.tensor_parallel_program``.

Arguments: FOLDER RANK RANKS. Runs the checks for this number of ranks and saves what each returned, or its traceback,
to ``FOLDER/rank<RANK>.pt``. The truth is the same layer or model in one process, which every rank runs by itself.
"""

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.contract import tensor_parallel_layers as layers
from tests.contract import tensor_parallel_models as models


def checks(ranks: int) -> list[Callable[[int, Path], Any]]:
    if ranks == 4:
        return [layers.codes, layers.uneven, models.sharded, models.codes_of_models, models.gathered_as_codes]
    return [layers.codes, layers.reductions, layers.refused, models.models, models.codes_of_models]


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for check in checks(ranks):
        try:
            found[check.__name__] = check(rank, folder)
        except Exception:  # noqa: BLE001 (the test of this check shows it)
            found[check.__name__] = traceback.format_exc()
    torch.save(found, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
