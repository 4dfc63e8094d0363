"""One of several ranks that share layers by tensor parallelism: ``python -m tests.contract.tensor_parallel_program``.

Arguments: FOLDER RANKS. The truth is the same layer or model in one process, which every rank runs by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import distributed

from tests.contract import tensor_parallel_engine as engine
from tests.contract import tensor_parallel_gathers as gathers
from tests.contract import tensor_parallel_layers as layers
from tests.contract import tensor_parallel_models as models
from tests.contract import tensor_parallel_use as use
from tests.contract import tensor_parallel_weights as weights
from tests.contract.gathered_inputs import empty_batches, gathered_inputs
from tests.contract.rank_processes import Checks, run_ranks

CHECKS: dict[int, dict[str, list[Callable[[int, Path], Any]]]] = {
    2: {
        "layers": [layers.codes, layers.reductions, layers.refused],
        "models": [models.training],
        "weights": [
            *(weights.weight_reductions, weights.weights_written, weights.rows_written, weights.optimizers_dropped),
        ],
        "use": [
            *(use.converted_later, use.checkpointed, use.cached, use.shared_inputs, use.saved, use.restored),
            *(
                use.half_precision,
                use.kept_for_backward,
                use.rows,
                use.compiled,
                use.watched,
                use.inferred,
                use.not_done,
            ),
            *(gathered_inputs, empty_batches, *engine.CHECKS),
        ],
    },
    4: {
        "layers": [layers.codes, layers.uneven, layers.unequal_slices],
        "models": [models.sharded],
        "gathers": [gathers.gathered_codes, gathers.gathered_traffic, gathers.replicated, gathers.not_gathered],
    },
}


def checks(ranks: int) -> Checks:
    return {f"{theme} {check.__name__}": check for theme, themes in CHECKS[ranks].items() for check in themes}


@contextmanager
def leaving_together() -> Iterator[None]:
    """No rank leaves while another still talks to it."""
    yield
    distributed.barrier()


if __name__ == "__main__":
    run_ranks(checks, around=leaving_together)
