"""One layer that trains for two steps while somebody finds something in it: a captured layer, as a run leaves it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import octavo
from octavo.doctor import Capture, Captures, Finding, Series, Severity, Thresholds, diagnose, watch
from octavo.recipes import Recipe


@contextmanager
def finding(*findings: Finding) -> Iterator[None]:
    """The only rule finds these, whatever it looks at."""

    def rule(series: Series, thresholds: Thresholds) -> Iterator[Finding]:
        yield from findings

    with mock.patch.dict(diagnose.__globals__, {"RULES": (rule,)}):
        yield


def found(code: str = "saturation", *, path: str = "0", **fields: object) -> Finding:
    return Finding(**({"code": code, "severity": Severity.WARN, "path": path} | fields))  # type: ignore[arg-type]


def captured(
    folder: Path,
    recipe: str | Recipe,
    *,
    x: Tensor,
    gradient: Tensor,
    before: Callable[[int], float] = lambda step: 1.0,
    steps: int = 2,
) -> Capture:
    """The layer of K inputs and N outputs in its last step, in which it sees ``x`` [M, K] and ``gradient`` [M, N].

    Args:
        folder: for the capture's file.
        recipe: of the layer.
        x: its input.
        gradient: of its output.
        before: what the input was multiplied with in an earlier step, by its number.
        steps: how many it trains for; 9 at most, since the rules are asked less often after 8 looks.
    """
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], gradient.shape[1], bias=False))
    octavo.convert(model, recipe, scale_updates="manual")
    watcher = watch(model, interval=1, captures=Captures(folder))
    for step in range(1, steps + 1):
        now = x if step == steps else x * before(step)
        with finding(*[found()] * (step >= steps - 1)), watcher.step():
            model(now.requires_grad_()).backward(gradient)
        octavo.update_scales(model)
    return Captures(folder).of("0")[0]
