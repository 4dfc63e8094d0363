"""Modules that FP8 does not suit: by what they are, by their statistics, by their shape."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from octavo.convert import HEAD_NAMES
from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import tracks
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["batch_norm", "sensitive_module", "slow_layer", "slow_layers"]

WRAPPED = ".base_layer"  # what PEFT calls the layer that an adapter is put around
ROUTER = "a router, where a small error sends a token elsewhere"
SENSITIVE = {
    **dict.fromkeys((*HEAD_NAMES, "head", "output_head"), "a head, whose gradient is as wide as the vocabulary"),
    "router": ROUTER,
    **dict.fromkeys(("embed_tokens", "embedding", "wte", "wpe"), "an embedding"),
}


def sensitive_module(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Heads, embeddings and routers among the layers that cast."""
    lost: dict[str, float] = {}
    seen: dict[str, tuple[float, float, Mapping[str, Any]]] = {}
    for track in tracks(series):
        path = track.key.path
        first, last, facts = seen.get(path, (math.inf, -math.inf, {}))
        newest = track.facts if track.steps[-1] >= last else facts
        seen[path] = min(first, track.steps[0]), max(last, track.steps[-1]), newest
        if track.key.role == "grad_output":
            usual = float(np.median(np.nan_to_num(track.of("underflow_fraction"))))
            lost[path] = max(lost.get(path, 0.0), usual)
    typical = np.median([facts["in_features"] for facts in series.layers.values()]) if series.layers else 0.0
    for path, (first, last, facts) in seen.items():
        underflow = lost.get(path, 0.0)
        what = _what_it_is(path, {**series.layers, path: facts}, limits, typical if underflow else np.inf)
        if what is not None:
            ran = "it runs" if facts == series.layers.get(path, facts) else f"until step {last:.0f} it ran"
            yield Finding(
                code="sensitive-module",
                severity=Severity.FAIL if underflow >= limits.underflow_fraction_fail else Severity.WARN,
                path=path,
                first_step=int(first),
                last_step=int(last),
                evidence={"underflow_fraction": underflow}
                | {name: float(facts[name]) for name in ("in_features", "out_features") if name in facts},
                cause=f"this is {what}, and {ran} {facts.get('recipe', 'FP8')}; "
                f"{underflow:.1%} of its gradient's nonzero elements become zero",
                weight=underflow,
            )


def _what_it_is(path: str, layers: Mapping[str, Mapping[str, Any]], limits: Thresholds, typical: float) -> str | None:
    """None of an ordinary layer; an adapter's second matrix widens as a head does, but from fewer features.

    What widens an MLP has what narrows it beside it. Where no gradient is lost (``typical`` is infinite) width harms
    nothing.
    """
    name, facts = _place(path)[1], layers.get(path, {})
    if name in SENSITIVE:
        return SENSITIVE[name]
    if not facts:
        return None
    inputs, outputs = facts["in_features"], facts["out_features"]
    if name == "gate" and limits.router_narrowing * outputs <= inputs and not _has_twin(path, layers):
        return ROUTER
    if outputs >= limits.head_widening * inputs >= limits.head_widening * typical and not _widens_an_mlp(path, layers):
        return f"as wide as a head ({inputs} to {outputs})"
    return None


def _widens_an_mlp(path: str, layers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a layer beside it leads back from as many features, or from half of them, as of a fused gate and up."""
    inputs, outputs = layers[path]["in_features"], layers[path]["out_features"]
    beside = [layers[other] for other in _beside(path, layers)]
    return any(facts["out_features"] == inputs and facts["in_features"] in (outputs, outputs / 2) for facts in beside)


def _has_twin(path: str, layers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a layer beside it has its shape, as the up projection beside a gate that narrows."""
    shape = [layers[path][name] for name in ("in_features", "out_features")]
    beside = [layers[other] for other in _beside(path, layers)]
    return any([facts.get(name) for name in ("in_features", "out_features")] == shape for facts in beside)


def _beside(path: str, layers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Paths of the other layers of its module."""
    return [other for other in layers if other != path and _place(other)[0] == _place(path)[0]]


def _place(path: str) -> tuple[str, str]:
    """A layer's module and its name there, of one that an adapter wraps the wrapper's.

    Example:
        >>> _place("layers.0.mlp.up_proj.base_layer")
        ('layers.0.mlp', 'up_proj')
    """
    parent, _, name = path.removesuffix(WRAPPED).rpartition(".")
    return parent, name


def batch_norm(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Batch norms whose batches lie far from their running statistics and do not come closer, or differ in size."""
    yield from _far_batches(series, limits)
    yield from _batches_of_many_sizes(series, limits)


def _batches_of_many_sizes(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """What a channel's variance is, and so what FP8 layers behind the norm see, hangs on how many rows it is taken of.

    A note where few are small, as the last batch of an epoch; a warning where half of them are.
    """
    table = series.modules.get("batch_norm_rows")
    if table is None:
        return
    for column, path in enumerate(table.keys):
        known = np.isfinite(table.values[:, column, 0])
        steps, rows = table.steps[known], table.values[known, column, 0]
        if len(rows) < limits.persistent_looks or rows.max() < limits.batch_norm_sizes * rows.min():
            continue
        small = rows * limits.batch_norm_sizes <= rows.max()
        yield Finding(
            code="batch-norm",
            severity=Severity.WARN if small.mean() >= limits.batch_norm_share else Severity.NOTE,
            path=path,
            first_step=int(steps[small][0]),
            last_step=int(steps[small][-1]),
            evidence={"least_rows": float(rows.min()), "most_rows": float(rows.max()), "looks": float(small.sum())},
            cause=f"its batches have from {rows.min():.0f} to {rows.max():.0f} rows, a quarter of the most or fewer at "
            f"{small.sum()} of {len(small)} looks: statistics of so few scatter, and FP8 layers beside it see other "
            "ranges from step to step",
            weight=rows.max() / rows.min(),
        )


def _far_batches(series: Series, limits: Thresholds) -> Iterator[Finding]:
    table = series.modules.get("batch_norm")
    if table is None:
        return
    for column, path in enumerate(table.keys):
        known = ~np.isnan(table.values[:, column, 0])
        steps, distance = table.steps[known], table.values[known, column, 0]
        if len(distance) < limits.persistent_looks or steps[-1] - steps[0] < limits.batch_norm_steps:
            continue
        far = distance >= limits.batch_norm_binades
        half = len(distance) // 2
        settles = np.median(distance[half:]) < limits.batch_norm_settling * np.median(distance[:half])
        if far.mean() >= limits.batch_norm_share and not settles:
            worst = min(float(distance.max()), 1000.0)
            yield Finding(
                code="batch-norm",
                severity=Severity.WARN,
                path=path,
                first_step=int(steps[far][0]),
                last_step=int(steps[far][-1]),
                evidence={"log2_variance_ratio": worst, "looks": float(far.sum())},
                cause=f"beyond what batches of its size scatter, half of the channels' variances lie up to "
                f"{2**worst:.3g}x from the running ones at {far.sum()} of {len(far)} looks and do not settle: "
                "FP8 layers beside it see other ranges in evaluation",
                weight=worst,
            )


def slow_layer(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """What :func:`slow_layers` finds, where the run was made on a GPU."""
    on_gpu = {path: facts for path, facts in series.layers.items() if facts.get("device") == "cuda"}
    yield from slow_layers(on_gpu, limits)


def slow_layers(layers: Mapping[str, Mapping[str, Any]], limits: Thresholds) -> Iterator[Finding]:
    """One note about all layers whose weights are so small that casting costs more than the GEMMs save.

    Args:
        layers: facts by path: "in_features", "out_features", and "casts", empty where a layer does not cast.
        limits: with ``slow_weight_elements``.
    """
    sizes = {path: facts["in_features"] * facts["out_features"] for path, facts in layers.items() if facts.get("casts")}
    slow = sorted((path for path, size in sizes.items() if size < limits.slow_weight_elements), key=lambda p: sizes[p])
    if slow:
        yield Finding(
            code="slow-layer",
            severity=Severity.NOTE,
            evidence={"layers": float(len(slow)), "of": float(len(sizes)), "weight_elements": float(sizes[slow[0]])},
            cause=f"{len(slow)} of {len(sizes)} FP8 layers have fewer than {limits.slow_weight_elements:.3g} weights, "
            f"where casting costs more than the GEMMs save: {', '.join(_patterns(slow))}",
            weight=len(slow) / len(sizes),
            places=tuple(slow),
        )


def _patterns(paths: Iterable[str]) -> list[str]:
    """The paths with a star for each number, and how many each stands for, in the paths' order.

    Example:
        >>> _patterns(["layers.0.k_proj", "layers.1.k_proj", "layers.0.v_proj"])
        ['layers.*.k_proj (2)', 'layers.0.v_proj']
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(".".join("*" if part.isdigit() else part for part in path.split(".")), []).append(path)
    return [alike[0] if len(alike) == 1 else f"{pattern} ({len(alike)})" for pattern, alike in groups.items()]
