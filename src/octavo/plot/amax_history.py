"""Amax history and scale of delayed layers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.doctor.histograms import CAST_IN
from octavo.errors import ConfigError
from octavo.html.wording import number
from octavo.nn import Linear
from octavo.nn.scaling_state import read_scaling_state
from octavo.numerics import CastSpec, Scaling, scale_from_amax
from octavo.plot.style import depth_colours, in_light, notebook_figure, small_title
from octavo.reports.figures import plain
from octavo.scaling import ROLES

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["history"]

MOST_LAYERS = 32
MOST_IN_LEGEND = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorHistory:
    """Finished steps of one tensor.

    Attributes:
        path: the layer's path.
        role: the tensor's role.
        steps: numbers of the finished steps, counted from 1, oldest first.
        amaxes: the amax of each.
        scale: decode scale of the next step.
        limit: the largest magnitude that this scale represents.
    """

    path: str
    role: str
    steps: list[int]
    amaxes: list[float]
    scale: float
    limit: float


def history(model: torch.nn.Module, *, layers: Iterable[str] = ()) -> "Figure":
    """Amax history of each delayed layer, a panel per role, and the range of the scale made from it.

    A line is the amaxes of finished steps, in the tensor's units; the bar after it is the largest magnitude that the
    scale of the next step represents, ``scale · maximum of the format``. An amax above the bar saturates.

    Args:
        model: a model with delayed recipes that has finished a step.
        layers: paths of the layers to draw; none for all, of which at most 32 are drawn: those whose newest amax is
            closest to the range of its scale, or furthest beyond.

    Raises:
        ConfigError: no layer has a history, none has finished a step, a path is not a layer with a history, or plotly
            is not installed.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = octavo.convert(model, "delayed", scale_updates="manual")
        >>> for amax in (1.0, 3.0):
        ...     model(torch.full((1, 4), amax)).sum().backward()
        ...     octavo.update_scales(model)
        >>> figure = history(model)
        >>> figure.data[0].name, figure.data[0].x, figure.data[0].y
        ('0', (1, 2), (1.0, 3.0))
    """
    every = list(_tensor_histories(model))
    tensors = _selected(every, list(layers))
    roles = [role for role in ROLES if any(one.role == role for one in tensors)]
    paths = list(dict.fromkeys(one.path for one in tensors))
    colours = dict(zip(paths, depth_colours(len(paths)), strict=True))
    figure = notebook_figure("amax", x="finished step; bars: range of the next scale", panels=roles)
    for one in tensors:
        _draw(figure, one, colours[one.path], row=roles.index(one.role) + 1, named=one.role == roles[0])
    figure.update_yaxes(type="log", exponentformat="power", nticks=4)
    figure.update_xaxes(rangemode="normal", tickformat="d")
    if not layers and len(paths) < (total := len({one.path for one in every if one.amaxes})):
        figure.update_layout(
            title=small_title(f"{len(paths)} of {total:,} layers: nearest to the range of their scale")
        )
    figure.update_layout(showlegend=len(paths) <= MOST_IN_LEGEND, hovermode="closest", height=80 + 220 * len(roles))
    return in_light(figure)


def _tensor_histories(model: torch.nn.Module) -> Iterator[_TensorHistory]:
    state = read_scaling_state(model)
    for path, layer in model.named_modules():
        if not isinstance(layer, Linear):
            continue
        for role in ROLES:
            key = f"{path}.{role}" if path else role
            spec = _delayed_cast(layer, role)
            if spec is not None and f"{key}.amax" in state:
                amax = state[f"{key}.amax"].cpu()
                window = state[f"{key}.amax_history"]
                amaxes = window[window >= 0].flip(0).tolist()
                scale = scale_from_amax(
                    amax, spec.format, rounding=spec.scale_rounding, amax_floor=spec.amax_floor, margin=spec.margin
                ).item()
                end = int(state[f"{key}.steps"]) + 1
                steps = list(range(end - len(amaxes), end))
                limit = scale * spec.format.max
                yield _TensorHistory(path=path, role=role, steps=steps, amaxes=amaxes, scale=scale, limit=limit)


def _delayed_cast(layer: Linear, role: str) -> CastSpec | None:
    """Cast of a role by the layer's latest recipe, if delayed."""
    gemm, side = CAST_IN[role]
    gemm_spec = getattr(layer.last_recipe or layer.recipe, gemm)
    spec: CastSpec | None = (gemm_spec.a, gemm_spec.b)[side]
    return spec if spec is not None and spec.scaling == Scaling.DELAYED else None


def _selected(tensors: list[_TensorHistory], layers: list[str]) -> list[_TensorHistory]:
    if not tensors:
        raise ConfigError(
            "no layer of this model keeps an amax history: its recipes make each scale from the tensor itself; "
            "convert it with a delayed recipe, or draw a watcher's statistics with octavo.plot.heat_map"
        )
    known = {one.path for one in tensors}
    if unknown := [path for path in layers if path not in known]:
        raise ConfigError(f"{unknown[0]!r} is not a layer with an amax history; use one of {', '.join(sorted(known))}")
    finished = [one for one in tensors if one.amaxes and (not layers or one.path in layers)]
    if not finished:
        raise ConfigError("no delayed layer has finished a step yet; train a step first")
    by_layer: dict[str, float] = {}
    for one in finished:
        by_layer[one.path] = max(by_layer.get(one.path, 0.0), one.amaxes[-1] / one.limit)
    kept = by_layer if layers else sorted(by_layer, key=by_layer.__getitem__, reverse=True)[:MOST_LAYERS]
    return [one for one in finished if one.path in kept]


def _draw(figure: "Figure", one: _TensorHistory, colour: str, *, row: int, named: bool) -> None:
    """Add the amaxes as a line, and the range of the next scale as a bar after it."""
    name = plain(one.path or "the model itself")
    group = {"legendgroup": name, "row": row, "col": 1}
    figure.add_scatter(
        x=one.steps, y=one.amaxes, name=name, mode="lines+markers", showlegend=named, **group,
        line={"color": colour, "width": 1.5}, marker={"size": 4},
        hovertemplate=f"{name}<br>step %{{x}}: amax %{{y:.4g}}<extra>{one.role}</extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=[one.steps[-1] + 1], y=[one.limit], name=name, mode="markers", showlegend=False, **group,
        marker={"symbol": "line-ew", "size": 12, "line": {"color": colour, "width": 2.5}},
        hovertemplate=f"{name}<br>scale {number(one.scale)}: up to %{{y:.4g}}<extra>{one.role}</extra>",
    )  # fmt: skip
