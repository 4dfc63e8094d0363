"""Check for layers that are slower in FP8 than in BF16: by their shape on Hopper GPUs, and measured on this device."""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.doctor import Thresholds
from octavo.doctor.replay import synchronized_time
from octavo.doctor.rules import slow_layers
from octavo.experiments.preflight.check import Check
from octavo.experiments.preflight.probe import Probe
from octavo.nn import Linear
from octavo.training.precision import surroundings
from octavo.training.recipe_choice import BF16
from octavo.training.threads import using_threads

__all__ = ["shapes_check", "time_ratios"]

NAME = "shapes"
ROUNDS = 9
MOST_ROWS = 4096


def shapes_check(probe: Probe, limits: Thresholds, *, step: int) -> Check:
    """Time forward and backward of every distinct FP8 shape, and find those too small for a Hopper GPU."""
    layers = {path: layer for path, layer in probe.model.named_modules() if _casts(layer)}
    if not layers:
        return Check(name=NAME, said="no layer casts to FP8")
    facts = {
        path: {"in_features": layer.in_features, "out_features": layer.out_features, "casts": ["E4M3"]}
        for path, layer in layers.items()
        if isinstance(layer, Linear)
    }
    findings = tuple(replace(one, first_step=step, last_step=step) for one in slow_layers(facts, limits))
    ratios = time_ratios(probe)
    here = ", ".join(f"{k} to {n}: {ratio:.2f}" for (k, n), ratio in ratios.items())
    summary = f"FP8's time over BF16's on this {probe.device.type}, forward and backward: {here}"
    return Check(name=NAME, said=summary, findings=findings)


def time_ratios(probe: Probe) -> dict[tuple[int, int], float]:
    """FP8's time over BF16's by (in_features, out_features), on the micro-batch's rows.

    The two run in turns, so that a busy machine slows both; the fastest round of each counts.
    """
    ratios: dict[tuple[int, int], float] = {}
    rows = min(probe.inputs.numel(), MOST_ROWS)
    for layer in probe.model.modules():
        if isinstance(layer, Linear) and _casts(layer):
            shape = (layer.in_features, layer.out_features)
            if shape not in ratios:
                ratios[shape] = _ratio(probe, layer, rows)
    return ratios


def _casts(layer: torch.nn.Module) -> bool:
    return isinstance(layer, Linear) and not layer.recipe.is_high_precision


def _ratio(probe: Probe, layer: Linear, rows: int) -> float:
    twins = [
        Linear(layer.in_features, layer.out_features, bias=False, recipe=recipe, device=probe.device)
        for recipe in (layer.recipe, BF16)
    ]
    x = torch.randn(rows, layer.in_features, device=probe.device)
    with using_threads(probe.training.threads):
        rounds = [[_seconds(probe, twin, x) for twin in twins] for _ in range(ROUNDS + 1)][1:]
    fp8, high = (min(seconds) for seconds in zip(*rounds, strict=True))
    return float(fp8 / high)


def _seconds(probe: Probe, layer: Linear, x: Tensor) -> float:
    x = x.detach().requires_grad_()
    started = synchronized_time(probe.device)
    with surroundings(probe.training, probe.device, layer):
        y = layer(x.to(layer.weight.dtype))
    y.backward(torch.ones_like(y))
    return synchronized_time(probe.device) - started
