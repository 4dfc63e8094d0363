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
from tests.contract import tensor_parallel_use as use

CHECKS: dict[int, dict[str, list[Callable[[int, Path], Any]]]] = {
    2: {
        "layers": [layers.codes, layers.reductions, layers.refused],
        "models": [models.training, models.codes],
        "use": [
            *(use.converted_later, use.checkpointed, use.cached, use.shared_inputs, use.saved, use.restored),
            *(use.half_precision, use.kept_for_backward, use.rows, use.compiled, use.watched, use.not_done),
        ],
    },
    4: {
        "layers": [layers.codes, layers.uneven],
        "models": [models.sharded, models.codes, models.gathered_as_codes],
    },
}


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for theme, checks in CHECKS[ranks].items():
        for check in checks:
            try:
                found[f"{theme} {check.__name__}"] = check(rank, folder)
            except Exception:  # noqa: BLE001 (the test of this check shows it)
                found[f"{theme} {check.__name__}"] = traceback.format_exc()
    torch.save(found, folder / f"rank{rank}.pt")
    distributed.barrier()  # no rank leaves while another still talks to it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
