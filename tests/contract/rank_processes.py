"""Programs of several ranks, each a process: what their checks returned, and what a layer keeps for backward there."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.policy.source_tree import ROOT


def results_of_ranks(program: str, folder: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """What each rank of ``python -m PROGRAM FOLDER RANK [ARGUMENTS]`` saved as ``rank<RANK>.pt``, by check."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", program, str(folder), str(rank), *arguments],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(told)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def of_check(results: list[dict[str, Any]], check: str) -> list[Any]:
    """What each rank returned for a check, none of which may have raised."""
    returned = [each[check] for each in results]
    for each in returned:
        assert not (isinstance(each, str) and each.startswith("Traceback")), each
    return returned


def kept_bytes(model: nn.Module, x: Tensor, besides: Callable[[], Iterable[Tensor]] = tuple) -> int:
    """Bytes of storage between the passes: of what autograd saves, and of ``besides``; a freed weight has none then."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    kept |= {tensor.untyped_storage()._cdata: tensor for tensor in besides()}
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    y.backward(torch.ones_like(y))
    return held
