"""Tensors on which casts differ: zeros, one outlier, amaxes that underflow a scale, ties, all magnitudes, ±Inf, NaN."""

import torch
from torch import Tensor

from octavo.engines import EngineCast, get
from octavo.formats import E4M3

__all__ = ["FINITE", "finite_tensors", "input_cast", "nonfinite_tensors", "same_codes", "tensor"]

ROWS, COLUMNS = 8, 256
FINITE = (
    "normal", "zeros", "signed zeros", "one outlier", "all magnitudes", "powers of two", "amaxes next to powers of two",
    "amaxes within 4 ulp of powers of two", "rows within 4 ulp of powers of two", "tiny", "subnormal", "largest",
    "ties", "scaled ties", "mixed rows", "many rows",
)  # fmt: skip


def finite_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """[8, 256] in ``dtype``, by name; some are larger."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    info = torch.finfo(dtype)
    outlier = normal.clone()
    outlier[0, 3], outlier[5, 200] = 1e4, -3e4
    exponents = torch.linspace(-30, 30, ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    if dtype is torch.float16:
        exponents = exponents / 2.5
    powers = torch.exp2(exponents.round())
    steps = torch.arange(ROWS * COLUMNS // 128).repeat_interleave(128).reshape(ROWS, COLUMNS)
    nearby = normal.clamp(-0.9, 0.9) / 4
    nearby[:, ::128] = E4M3.max * torch.exp2(-steps[:, ::128].float()) * (1 + (steps[:, ::128] % 3 - 1) * 2.0**-7)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values.nan_to_num(E4M3.max)
    ties = (values + values.roll(1)) / 2
    ties[0] = E4M3.max
    mixed = normal * torch.logspace(-6, 3, ROWS)[:, None]
    mixed[3] = 0
    tensors = {
        "normal": normal,
        "zeros": torch.zeros(ROWS, COLUMNS),
        "signed zeros": torch.zeros(ROWS, COLUMNS).copysign(normal),
        "one outlier": outlier,
        "all magnitudes": torch.exp2(exponents) * normal.sign(),
        "powers of two": powers * normal.sign(),
        "amaxes next to powers of two": nearby,
        "amaxes within 4 ulp of powers of two": amaxes_near_powers(),
        "rows within 4 ulp of powers of two": amaxes_near_powers().reshape(-1, 128),
        "tiny": normal * info.smallest_normal * 4,
        "subnormal": normal * info.smallest_normal / 8,
        "largest": normal.sign() * info.max,
        "ties": ties.expand(ROWS, COLUMNS).clone(),
        "scaled ties": ties * torch.tensor([0.37, 1e-3, 0.0107, 3.3, 0.71, 0.0039, 1.9, 0.13])[:, None],
        "mixed rows": mixed,
        "many rows": torch.randn(64, COLUMNS, generator=generator) * 3,
    }
    assert tuple(tensors) == FINITE
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def amaxes_near_powers() -> Tensor:
    """[8, 9216]: the limit times powers of two, and up to 4 steps of FP32 around, as amaxes of 128 columns each.

    A row's amaxes are half of those of the row before, so that the first row's are those of blocks.
    """
    powers = E4M3.max * torch.exp2(torch.tensor([-12, -9, -5, -2, 1, 3, 4, 6]).float())
    amaxes = (powers.view(torch.int32)[:, None] + torch.arange(-4, 5)).view(torch.float32).flatten()
    columns = torch.zeros(len(amaxes), 128)
    columns[:, 0], columns[:, 1:] = amaxes, amaxes[:, None] * torch.linspace(-0.9, 0.9, 127)
    return columns.flatten() * torch.exp2(-torch.arange(ROWS).float())[:, None]


def nonfinite_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """[8, 256] with some elements that are not finite."""
    infinite, nan = finite_tensors(dtype)["normal"], finite_tensors(dtype)["normal"]
    infinite[0, 1], infinite[2, 100], nan[1, 7] = torch.inf, -torch.inf, torch.nan
    return {"Inf": infinite, "NaN": nan}


def tensor(name: str, dtype: torch.dtype) -> Tensor:
    """One of all, by its name."""
    return (finite_tensors(dtype) | nonfinite_tensors(dtype))[name]


def same_codes(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all bytes are equal; the sign of a NaN is unspecified."""
    both_nan = ours.float().isnan() & theirs.float().isnan()
    return ours.dtype == theirs.dtype and bool(((ours.view(torch.uint8) == theirs.view(torch.uint8)) | both_nan).all())


def input_cast(engine: str) -> EngineCast:
    """Cast of an engine's inputs."""
    cast = get(engine).input
    assert cast is not None
    return cast
