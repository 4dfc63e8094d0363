"""Series for the rules: looks at a real layer, of which a test changes a few numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

import octavo
from octavo.doctor import Sample, Series, series_of, watch
from octavo.doctor.series import CastKey, ProductKey
from octavo.doctor.statistics import CAST_FIELDS, PRODUCT_FIELDS

FIRST, SECOND, HEAD = "first", "second", "lm_head"
Values = float | Sequence[float] | np.ndarray
Changes = Mapping[Any, Mapping[str, Any]]


@cache
def _sample(recipe: octavo.recipes.Recipe) -> Sample:
    """One look at three layers of Gaussian tensors."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    for name in (FIRST, SECOND, HEAD):
        model.add_module(name, torch.nn.Linear(64, 64, bias=False))
    octavo.convert(model, recipe, convert_head=True)
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, interval=1)
    with watcher.step():
        (model(torch.randn(128, 64, requires_grad=True)) * torch.randn(128, 64)).sum().backward()
        optimizer.step()
    return watcher.samples[0]


def healthy_sample(recipe: str, **options) -> Sample:
    """A look at two layers, "first" and "second", with a head in high precision."""
    found = _sample(octavo.recipes.get(recipe, **options))

    def kept(table: dict) -> dict:
        return {key: numbers for key, numbers in table.items() if key[0] != HEAD}

    return replace(
        found,
        casts=kept(found.casts),
        products=kept(found.products),
        layers={p: found.layers[p] for p in (FIRST, SECOND)},
    )


def looks(
    recipe: str | Sample = "tensorwise",
    *,
    count: int = 6,
    interval: int = 5,
    casts: Changes | None = None,
    products: Changes | None = None,
    updates: Values | None = None,
    modules: Changes | None = None,
    noise: Values | None = None,
    lines: Iterable[Mapping[str, Any]] = (),
    **options,
) -> Series:
    """A run that was looked at ``count`` times, each the same healthy look but for what is given.

    Args:
        recipe: of the layers, or a look to begin with.
        count: of the looks.
        interval: steps between them; the first is step ``interval``.
        casts: by path and role, or path, role and GEMM: numbers of CAST_FIELDS, one for all looks or one each.
        products: the same of PRODUCT_FIELDS by path and GEMM.
        updates: every parameter's update ratio.
        modules: by name and path.
        noise: gradient_to_noise.
        lines: others, as in metrics.jsonl.
        options: of the recipe.
    """
    base = healthy_sample(recipe, **options) if isinstance(recipe, str) else recipe
    samples = []
    for index in range(count):
        parameters = {name: numbers.copy() for name, numbers in base.parameters.items()}
        for numbers in parameters.values():
            numbers[2] = numbers[2] if updates is None else _at(updates, index)
        samples.append(
            replace(
                base,
                step=(index + 1) * interval,
                casts=_changed(base.casts, CAST_FIELDS, casts or {}, index),
                products=_changed(base.products, PRODUCT_FIELDS, products or {}, index),
                parameters=parameters,
                modules={
                    name: {path: _at(values, index) for path, values in found.items()}
                    for name, found in (modules or {}).items()
                },
                scalars=base.scalars if noise is None else {"gradient_to_noise": _at(noise, index)},
            )
        )
    return series_of(lines, samples)


def steps(losses: Sequence[float], **numbers: Values) -> list[dict]:
    """Lines of steps from 1 on."""
    return [
        {"kind": "step", "step": index + 1, "loss": loss, **{name: _at(v, index) for name, v in numbers.items()}}
        for index, loss in enumerate(losses)
    ]


def _changed(table: dict, names: tuple[str, ...], changes: Mapping, index: int) -> dict:
    found = {}
    for key, original in table.items():
        numbers = original.copy()
        for place, fields in changes.items():
            if key[: len(place)] == place:
                for name, values in fields.items():
                    numbers[names.index(name)] = _at(values, index)
        found[key] = numbers
    unknown = [place for place in changes if not any(key[: len(place)] == place for key in table)]
    assert not unknown, f"{unknown} are no places; there are {list(table)}"
    return found


def _at(values: Values, index: int) -> float:
    return float(values) if isinstance(values, int | float) else float(values[index])


def renamed(sample: Sample, names: Mapping[str, str]) -> Sample:
    """The look at the same layers under other paths."""
    return replace(
        sample,
        casts={CastKey(names.get(key.path, key.path), *key[1:]): numbers for key, numbers in sample.casts.items()},
        products={ProductKey(names.get(key.path, key.path), key.gemm): v for key, v in sample.products.items()},
        layers={names.get(path, path): facts for path, facts in sample.layers.items()},
    )
