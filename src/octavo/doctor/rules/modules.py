"""Rules for modules that are unsuited to FP8 by their kind, their statistics or their shape."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from octavo.convert import HEAD_NAMES
from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import module_tracks, tracks
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["batch_norm", "sensitive_module", "slow_layer", "slow_layers"]

WRAPPED = ".base_layer"  # PEFT's name for the layer inside an adapter
ROUTER = "a router, where a small error sends a token elsewhere"
SENSITIVE = {
    **dict.fromkeys((*HEAD_NAMES, "head", "output_head"), "a head, whose gradient is as wide as the vocabulary"),
    "router": ROUTER,
    **dict.fromkeys(("embed_tokens", "embedding", "wte", "wpe"), "an embedding"),
}


def sensitive_module(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find heads, embeddings and routers among the layers that cast.

    A head, router or embedding is recognised by its name or shape: an output ``head_widening`` times as wide as the
    input, or a router ``router_narrowing`` times as narrow. Severity fail where half of the gradient becomes zero.
    """
    lost: dict[str, float] = {}
    steps_and_facts: dict[str, tuple[float, float, Mapping[str, Any]]] = {}
    for track in tracks(series):
        path = track.key.path
        first, last, facts = steps_and_facts.get(path, (math.inf, -math.inf, {}))
        newest = track.facts if track.steps[-1] >= last else facts
        steps_and_facts[path] = min(first, track.steps[0]), max(last, track.steps[-1]), newest
        if track.key.role == "grad_output":
            median_underflow = float(np.median(np.nan_to_num(track.of("underflow_fraction"))))
            lost[path] = max(lost.get(path, 0.0), median_underflow)
    typical = np.median([facts["in_features"] for facts in series.layers.values()]) if series.layers else 0.0
    for path, (first, last, facts) in steps_and_facts.items():
        underflow = lost.get(path, 0.0)
        kind = _sensitive_kind(path, {**series.layers, path: facts}, limits, typical if underflow else np.inf)
        if kind is not None:
            ran = "it runs" if facts == series.layers.get(path, facts) else f"until step {last:.0f} it ran"
            yield Finding(
                code="sensitive-module",
                severity=Severity.FAIL if underflow >= limits.underflow_fraction_fail else Severity.WARN,
                path=path,
                first_step=int(first),
                last_step=int(last),
                evidence={"underflow_fraction": underflow}
                | {name: float(facts[name]) for name in ("in_features", "out_features") if name in facts},
                cause=f"this is {kind}, and {ran} {facts.get('recipe', 'FP8')}; "
                f"{underflow:.1%} of its gradient's nonzero elements become zero",
                weight=underflow,
            )


def _sensitive_kind(
    path: str, layers: Mapping[str, Mapping[str, Any]], limits: Thresholds, typical: float
) -> str | None:
    """Kind of a sensitive layer; None for an ordinary one.

    A layer that widens as a head does is not one if it has fewer inputs than is typical (an adapter's second matrix) or
    if a sibling narrows again (an MLP). Without lost gradients (``typical`` is infinite) width is harmless.
    """
    name, facts = _module_and_name(path)[1], layers.get(path, {})
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
    """True if a sibling maps the outputs, or half of them (fused gate and up), back to the inputs."""
    inputs, outputs = layers[path]["in_features"], layers[path]["out_features"]
    siblings = [layers[other] for other in _siblings(path, layers)]
    return any(facts["out_features"] == inputs and facts["in_features"] in (outputs, outputs / 2) for facts in siblings)


def _has_twin(path: str, layers: Mapping[str, Mapping[str, Any]]) -> bool:
    """True if a sibling has the same shape, as the up projection of a narrowing gate."""
    shape = [layers[path][name] for name in ("in_features", "out_features")]
    siblings = [layers[other] for other in _siblings(path, layers)]
    return any([facts.get(name) for name in ("in_features", "out_features")] == shape for facts in siblings)


def _siblings(path: str, layers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Paths of the other layers of the same module."""
    return [other for other in layers if other != path and _module_and_name(other)[0] == _module_and_name(path)[0]]


def _module_and_name(path: str) -> tuple[str, str]:
    """Module and name of a layer; for a layer inside an adapter, those of the adapter.

    Example:
        >>> _module_and_name("layers.0.mlp.up_proj.base_layer")
        ('layers.0.mlp', 'up_proj')
    """
    parent, _, name = path.removesuffix(WRAPPED).rpartition(".")
    return parent, name


def batch_norm(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find batch norms whose batches differ from their running statistics without converging, or vary in size.

    The median channel's variance is ``batch_norm_binades`` binades off in ``batch_norm_share`` of the samples over
    ``batch_norm_steps`` steps; or one of three samples has at most 1 / ``batch_norm_sizes`` of the rows of the largest.
    """
    yield from _far_batches(series, limits)
    yield from _batches_of_many_sizes(series, limits)


def _batches_of_many_sizes(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find batch norms with batches of very different sizes, whose variances scatter differently.

    A note if few batches are small, such as the last one of an epoch; a warning if half of them are.
    """
    for path, all_steps, all_rows in module_tracks(series, "batch_norm_rows"):
        steps, rows = all_steps[np.isfinite(all_rows)], all_rows[np.isfinite(all_rows)]
        if len(rows) < limits.persistent_looks or rows.max() < limits.batch_norm_sizes * rows.min():
            continue
        small = rows * limits.batch_norm_sizes <= rows.max()
        yield Finding(
            code="batch-norm",
            severity=Severity.WARN if small.mean() >= limits.batch_norm_share else Severity.NOTE,
            path=path,
            first_step=int(steps[small][0]),
            last_step=int(steps[small][-1]),
            evidence={"least_rows": float(rows.min()), "most_rows": float(rows.max()), "samples": float(small.sum())},
            cause=f"its batches have from {rows.min():.0f} to {rows.max():.0f} rows, a quarter of the most or fewer in "
            f"{small.sum()} of {len(small)} samples: statistics of so few rows scatter, and the ranges of nearby FP8 "
            "layers change from step to step",
            weight=rows.max() / rows.min(),
        )


def _far_batches(series: Series, limits: Thresholds) -> Iterator[Finding]:
    for path, all_steps, distances in module_tracks(series, "batch_norm"):
        steps, distance = all_steps[~np.isnan(distances)], distances[~np.isnan(distances)]
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
                evidence={"log2_variance_ratio": worst, "samples": float(far.sum())},
                cause=f"half of the channels' variances differ by up to {2**worst:.3g}x from the running ones, beyond "
                f"the scatter of batches of this size, in {far.sum()} of {len(far)} samples, and do not settle: "
                "the ranges of nearby FP8 layers change in evaluation",
                weight=worst,
            )


def slow_layer(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Apply :func:`slow_layers` to the layers that ran on a GPU."""
    on_gpu = {path: facts for path, facts in series.layers.items() if facts.get("device") == "cuda"}
    yield from slow_layers(on_gpu, limits)


def slow_layers(layers: Mapping[str, Mapping[str, Any]], limits: Thresholds) -> Iterator[Finding]:
    """Find all layers whose weights are so small that casting costs more than the GEMMs save: one note.

    Judged by the number of weights alone: fewer than ``slow_weight_elements``, on a GPU.

    Args:
        layers: facts by path: "in_features", "out_features", and "casts", empty for a layer that does not cast.
        limits: thresholds of the rules.
    """
    sizes = {path: facts["in_features"] * facts["out_features"] for path, facts in layers.items() if facts.get("casts")}
    slow = sorted((path for path, size in sizes.items() if size < limits.slow_weight_elements), key=lambda p: sizes[p])
    if slow:
        yield Finding(
            code="slow-layer",
            severity=Severity.NOTE,
            evidence={"layers": float(len(slow)), "of": float(len(sizes)), "weight_elements": float(sizes[slow[0]])},
            cause=f"{len(slow)} of {len(sizes)} FP8 layers have fewer than {limits.slow_weight_elements:.3g} weights, "
            f"where casting costs more than the GEMMs save: {', '.join(_group_paths(slow))}",
            weight=len(slow) / len(sizes),
            places=tuple(slow),
        )


def _group_paths(paths: Iterable[str]) -> list[str]:
    """Group paths that differ only in numbers: patterns with a star for each number, and the size of each group.

    Example:
        >>> _group_paths(["layers.0.k_proj", "layers.1.k_proj", "layers.0.v_proj"])
        ['layers.*.k_proj (2)', 'layers.0.v_proj']
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(".".join("*" if part.isdigit() else part for part in path.split(".")), []).append(path)
    return [group[0] if len(group) == 1 else f"{pattern} ({len(group)})" for pattern, group in groups.items()]
