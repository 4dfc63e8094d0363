"""HTML page of a plan: the recipes, and where the time of each step goes."""

from itertools import cycle
from typing import Any

from octavo.planning import Option, Plan, advise
from octavo.planning.advice import HOLDS, speedup_text
from octavo.planning.constants import WORK
from octavo.planning.plan import LayerGain
from octavo.reports.figures import PALETTE, SHEET, new_figure, plain
from octavo.reports.rendering import check_report_extra, render

__all__ = ["plan_page"]

COLOURS = dict(zip(WORK, PALETTE.values(), strict=True))
MEMORY = {  # parts of octavo.planning's Memory, in words
    "weights": "weights",
    "codes": "FP8 copies of weights",
    "gradients": "gradients",
    "moments": "the optimizer's moments",
    "activations": "activations kept for backward",
    "working": "temporary tensors",
    "reserved": "CUDA context and buffers",
}
COLUMNS = ("recipe", "× BF16", "step", "80 %", "tokens/s/GPU", "MFU", "memory", "days", "cost", "MWh", "layout")


def plan_page(plan: Plan) -> str:
    """HTML of a plan.

    Raises:
        ConfigError: plotly or jinja2 is not installed.
    """
    check_report_extra("the page of a plan")
    request = plan.request
    heading = f"{request.model.name} on {request.gpus:,} × {request.hardware.name}"
    facts = {
        "parameters": f"{request.model.parameters / 1e9:,.1f} billion",
        "sequence": f"{request.seq:,} tokens",
        "batch": f"{request.batch:,} sequences",
        "training": f"{request.tokens / 1e9:,.10g} billion tokens",
        **({"price": f"{request.price:,g} per GPU-hour"} if request.price else {}),
        "program": str(request.framework),
        "hardware": request.hardware.source,
    }
    answer = advise(plan)
    columns = [name for name in COLUMNS if request.price or name != "cost"]
    layers = [
        (layer.name, f"{layer.share:.0%}", f"{layer.speedup:.2f}", "gains" if layer.speedup >= 1 else "keep in BF16")
        for layer in plan.layers
    ]
    return render(
        "plan",
        heading=heading,
        facts=facts,
        answer=answer.sentence,
        calibrated=plan.calibrated_with,
        checks=[(each.name, HOLDS[each.holds], each.sentence) for each in answer.checks],
        columns=columns,
        peak=f"{request.hardware.bf16:,g}",
        rows=[[_cells(plan, option)[name] for name in columns] for option in plan.options if option.candidate],
        refused=[(option.name, option.reason) for option in plan.options if option.candidate is None],
        legend=[(WORK[name], colour) for name, colour in COLOURS.items()],
        figure=_figure(plan),
        flame=_flame(plan),
        layer_figure=_layer_figure(plan),
        layer_legend=[(layer.name.replace("_", " "), colour) for layer, colour in _coloured_layers(plan)],
        memory=_memory(plan),
        activations=_activations(plan),
        layers=layers,
        fastest=plan.best_fp8.name if plan.best_fp8 else "",
    )


def _cells(plan: Plan, option: Option) -> dict[str, str]:
    """Cells of a recipe by column."""
    record = next(each for each in plan.record()["options"] if each["recipe"] == option.name)
    recomputed = option.candidate.recomputed if option.candidate else ""
    return {
        "recipe": option.name,
        "× BF16": "1" if option.speedup is None else speedup_text(option.speedup[0]),
        "step": f"{record['step_time_s']:.3g} s",
        "80 %": f"{record['step_time_low_s']:.3g}–{record['step_time_high_s']:.3g} s",
        "tokens/s/GPU": f"{record['tokens_per_s_per_gpu']:,.0f}",
        "MFU": f"{record['mfu']:.0%}",
        "memory": f"{record['memory_gb']:.0f} GB",
        "days": f"{record['days']:.3g}",
        "cost": f"{record['cost'] or 0:,.0f}",
        "MWh": f"{record['megawatt_hours']:,.3g}" if record["megawatt_hours"] else "–",
        "layout": f"{record['layout']}, micro-batch {record['micro_batch']}, recompute {recomputed}",
    }


def _figure(plan: Plan) -> Any:
    """A bar a recipe, divided by where the time goes, from the step's start on the left."""
    figure = new_figure("", x="seconds of a step")
    shown = [option for option in plan.options if option.candidate is not None][::-1]
    for name, colour in COLOURS.items():
        values = [option.candidate.seconds.get(name, 0.0) for option in shown if option.candidate is not None]
        labels = [plain(option.name) for option in shown]
        figure.add_bar(x=values, y=labels, name=plain(WORK[name]), orientation="h", marker={"color": colour})
    figure.update_layout(barmode="stack", hovermode="closest")
    figure.update_yaxes(type="category", showgrid=False)
    return figure


def _flame(plan: Plan) -> Any:
    """A step of BF16 above one of the fastest FP8 recipe, to one scale: a kind of work a block, below it its layers."""
    import plotly.graph_objects as go

    figure = new_figure("")
    shown = [option for option in plan.options if option.name in plan.by_layer and option.candidate is not None]
    longest = max(option.candidate.seconds["total"] for option in shown if option.candidate is not None)
    for row, option in enumerate(shown):
        assert option.candidate is not None
        total = option.candidate.seconds["total"]
        # A block with blocks below it is as long as they are together.
        blocks = [(option.name, "", f"{plain(option.name)}, {total:.3g} s", 0.0, SHEET)]
        for kind, colour in COLOURS.items():
            layers = plan.by_layer[option.name].get(kind, {})
            spent = option.candidate.seconds.get(kind, 0.0)
            if spent > 0:
                blocks.append((kind, option.name, plain(WORK[kind]), 0.0 if layers else spent, colour))
                blocks += [(f"{kind} {n}", kind, plain(n.replace("_", " ")), t, colour) for n, t in layers.items()]
        ids, parents, labels, values, colours = zip(*blocks, strict=True)
        height = 1 / len(shown)
        figure.add_trace(
            go.Icicle(
                ids=ids,
                parents=parents,
                labels=labels,
                values=values,
                marker={"colors": colours, "line": {"color": SHEET, "width": 1}},
                tiling={"orientation": "v"},
                leaf={"opacity": 1},
                domain={"x": [0, total / longest], "y": [1 - (row + 1) * height + 0.02, 1 - row * height]},
                hovertemplate="%{label}<br>%{value:.3g} s, %{percentRoot:.1%} of the step<extra></extra>",
                sort=False,
                pathbar={"visible": False},
            )
        )
    figure.update_layout(uniformtext={"minsize": 10, "mode": "hide"})  # smaller text is told by the legend
    return figure


def _coloured_layers(plan: Plan) -> list[tuple[LayerGain, str]]:
    """The layers with a colour each, the largest first."""
    layers = sorted(plan.layers, key=lambda layer: -layer.bf16)
    return list(zip(layers, cycle(PALETTE.values())))


def _layer_figure(plan: Plan) -> Any:
    """A bar for BF16 and one for FP8, divided by the layers of a micro-batch, casts included."""
    figure = new_figure("", x="seconds of a micro-batch")
    names = [plain(plan.best_fp8.name if plan.best_fp8 else "fp8"), "bf16"]
    for layer, colour in _coloured_layers(plan):
        name = plain(layer.name.replace("_", " "))
        figure.add_bar(x=[layer.fp8, layer.bf16], y=names, name=name, orientation="h", marker={"color": colour})
    figure.update_layout(barmode="stack", hovermode="closest")
    figure.update_yaxes(type="category", showgrid=False)
    return figure


def _shown(plan: Plan) -> list[dict[str, Any]]:
    """Records of BF16 and of the fastest FP8 recipe."""
    names = ["bf16", *([plan.best_fp8.name] if plan.best_fp8 else [])]
    return [option for option in plan.record()["options"] if option["recipe"] in names]


def _memory(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of what fills a GPU's memory."""
    shown = _shown(plan)
    parts = [option["memory_gb_by_part"] for option in shown]
    rows = [(MEMORY[name], *(f"{each[name]:.1f} GB" for each in parts)) for name in parts[0]]
    return ("", *(option["recipe"] for option in shown)), rows


def _activations(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of what backward keeps, by layer and policy of recomputation."""
    shown = _shown(plan)
    columns = [(option["recipe"], policy) for option in shown for policy in option["activations_gb_by_layer"]]
    cells = [option["activations_gb_by_layer"][policy] for option in shown for policy in ("none", "selective", "full")]
    names = list(dict.fromkeys(name for each in cells for name in each))
    rows = [
        (name.replace("_", " "), *(f"{each[name]:.1f}" if name in each else "–" for each in cells)) for name in names
    ]
    rows.append(("all", *(f"{sum(each.values()):.1f}" for each in cells)))
    return ("GB", *(f"{recipe}, {policy}" for recipe, policy in columns)), rows
