"""The end of a delayed step: a window as long as Transformer Engine's, and the longest."""

from collections.abc import Callable
from functools import partial

import torch

from octavo.kernels.triton import history

_amax, _pending, _broken = torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.bool)
_steps, _region = torch.zeros(3, dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _close(length: int, **options: object) -> None:
    history.close_step(torch.ones(3, length), _amax, _pending, _broken, _steps, **options)  # type: ignore[arg-type]


CALLS: dict[str, Callable[[], object]] = {
    "1024 steps": partial(_close, 1024, latest=False, interval=1, backoff=1.0, left=(_region, 7)),
    "4096 steps": partial(_close, 4096, latest=False, interval=3, backoff=0.99),
}
