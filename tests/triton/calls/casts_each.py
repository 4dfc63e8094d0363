"""Eight experts' casts with a scale each."""

from collections.abc import Callable
from functools import partial

import torch

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.triton import casts_each
from octavo.numerics import CastSpec

COUNTS = (512, 1, 100, 1000, 16, 300, 700, 64)
SOURCES = ("measured", "amax", "known", "scale")


def cast(source: str, dtype: torch.dtype, fmt: Format, columns: int = 1024) -> None:
    given = {} if source == "measured" else {"scale" if source == "scale" else "amax": torch.ones(len(COUNTS))}
    parts = torch.empty(sum(COUNTS), columns, dtype=dtype).split(COUNTS)
    casts_each.cast_matrices(parts, CastSpec(format=fmt), measure_if_zero=source == "known", measure=False, **given)


CALLS: dict[str, Callable[[], object]] = {
    f"{source}, {dtype}, {fmt}": partial(cast, source, dtype, fmt)
    for source in SOURCES
    for dtype in (torch.bfloat16, torch.float32)
    for fmt in (E4M3, E5M2)
}
CALLS |= {"unaligned rows": partial(cast, "measured", torch.bfloat16, E4M3, 1001)}
