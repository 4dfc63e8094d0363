"""Checkpoints of several ranks, written through torch.distributed.checkpoint.

Each rank writes the pieces that it holds; of what several hold, one. torch's protocol has two rounds, whose failures
all ranks learn:

| round | a rank                         | between the rounds the first rank                              |
|-------|--------------------------------|----------------------------------------------------------------|
| plan  | lists its pieces               | shares them out and makes a hidden folder                      |
| write | writes its files into it       | writes state.json with their SHA-256, and renames the folder   |

Files are torch's safetensors, not its default of pickles.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from octavo.errors import CheckpointError
from octavo.files import replacing_folder
from octavo.training.checkpoint_files import fingerprint, name_of_part

__all__ = ["write_shards"]

Fingerprints = dict[str, dict[str, Any]]


def write_shards(
    target: Path,
    files: Mapping[str, Mapping[str, Tensor]],
    describe: Callable[[Path, Fingerprints], None],
    *,
    group: Any,
) -> None:
    """Write a checkpoint from all ranks.

    Args:
        target: the folder, which appears complete.
        files: tensors by name, by the name that one process gives their file; on all ranks the same names.
        describe: called on the first rank with the hidden folder and its files' fingerprints, to write the last file.
        group: process group of the ranks; None for the default one.

    Raises:
        CheckpointError: a rank could not write; on all ranks, with its number.
    """
    with ExitStack() as opened:
        writer = _ShardWriter(target, files, describe, opened)
        tensors = {name: tensor for each in files.values() for name, tensor in each.items()}
        try:
            save(tensors, storage_writer=writer, process_group=group)
        except CheckpointException as failure:
            rank, (error, _) = min(failure.failures.items(), key=lambda each: each[0])
            raise CheckpointError(f"rank {rank}: cannot save {str(target)!r}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return (
            f"{error.strerror or error}; free some space or choose another disk and resume, earlier checkpoints are "
            "intact"
        )
    return f"{type(error).__name__}: {error}; earlier checkpoints are intact"


class _ShardWriter(HuggingFaceStorageWriter):
    """Writer of one checkpoint; see :func:`write_shards`."""

    def __init__(
        self,
        target: Path,
        files: Mapping[str, Mapping[str, Tensor]],
        describe: Callable[[Path, Fingerprints], None],
        opened: ExitStack,
    ) -> None:
        numbers = {name: number for number, tensors in enumerate(files.values(), 1) for name in tensors}
        super().__init__(str(target), fqn_to_index_mapping=numbers, save_distributed=True)
        self._target, self._kinds, self._describe, self._opened = target, list(files), describe, opened

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create no folder, unlike torch's writer."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the hidden folder, whose name goes to all ranks with their plans."""
        folder = self._opened.enter_context(replacing_folder(self._target, is_own=Path.is_dir))
        common = {"folder": folder, "ranks": len(plans)}
        return [replace(plan, storage_data=plan.storage_data | common) for plan in super().prepare_global_plan(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "torch.futures.Future[Any]":
        """Write this rank's files; their names and fingerprints are the result."""
        folder, number = plan.storage_data["folder"], plan.storage_data["shard_index"]
        self.path = folder
        super().write_data(plan, planner).wait()
        written: Fingerprints = {}
        for file in sorted(folder.glob(f"shard-{number:05}-*")):
            kind = self._kinds[int(file.name.split("-")[3]) - 1]
            part = file.rename(folder / name_of_part(kind, number - 1, plan.storage_data["ranks"]))
            written[part.name] = fingerprint(part)
        result: torch.futures.Future[Any] = torch.futures.Future()
        result.set_result(written)
        return result

    def finish(self, metadata: object, results: list[Any]) -> None:
        """Complete the folder and give it its name."""
        self._describe(Path(self.path), {name: sums for each in results for name, sums in each.items()})
        self._opened.close()
