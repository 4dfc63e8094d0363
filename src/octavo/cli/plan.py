"""``octavo plan`` and ``octavo advise``: what FP8 will gain, predicted before any GPU is rented."""

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.output_files import check_target
from octavo.errors import ConfigError
from octavo.planning import (
    Advice,
    Constants,
    Hardware,
    Option,
    Plan,
    PlanRequest,
    advise,
    find_hardware,
    fitted_constants,
    load_shape,
    make_plan,
    predict_row,
    read_rows,
)
from octavo.planning.advice import HOLDS, TOLERANCE, speedup_text
from octavo.planning.calibration import calibrated, read_calibration
from octavo.planning.constants import WORK
from octavo.planning.jobs import TRAINED_WITH, Framework
from octavo.planning.plan_comparison import compare_plans, read_plan
from octavo.planning.serving_plan import ServingRequest, serving_answer, serving_points
from octavo.planning.this_cpu import measure_cpu
from octavo.training.study_table import ARTICLE

__all__ = ["advise_on_model", "plan"]

SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
OF_BOTH = frozenset({"model", "hardware", "gpus", "framework"})
USED = {  # options by what is asked for
    "rows": frozenset({"rows"}),
    "compare": frozenset({"compare"}),
    "inference": OF_BOTH | {"prompt", "answer", "load"},
    "training": OF_BOTH | {"seq", "global_batch", "tokens", "price", "calibrate", "report"},
}
WITHOUT_EFFECT = {
    "rows": "has no effect with --rows, whose file has every setting",
    "compare": "has no effect with --compare, whose files have every setting",
    "inference": "is of a training, and has no effect with --answer, which plans inference",
    "training": "is of inference, and has no effect without --answer",
}
UNTRIED = (
    "Predicted from published measurements of other programs. Octavo's own compiled training step of 1.04 B parameters "
    "ran at 0.82 of BF16's speed on one H100."
)
Model = Annotated[str | None, typer.Option("--model", help="A model's name, its config.json, or a folder with one.")]
Accelerator = Annotated[
    str, typer.Option("--hardware", help="a100, h100, h200, b200, gb200, b300, mi300x, l40s, …; cpu measures this one")
]
GPUS = "Number of GPUs"
Gpus = Annotated[int, typer.Option("--gpus", help=f"{GPUS}; of one replica with --answer.")]
Seq = Annotated[int, typer.Option("--seq", help="Tokens of a sequence.")]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", help="Sequences a step; 0: 4 M tokens, one a GPU at least.")
]
Calibrate = Annotated[
    Path | None, typer.Option("--calibrate", help="Take GEMM speeds from a result of benchmarks.hopper.")
]
PROGRAMS = "Program that trains; vllm and tensorrt-llm serve, with --answer. [default: torchtitan, or vllm]"
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(
    *,
    context: typer.Context,
    model: Model = None,
    hardware: Accelerator = "h100",
    gpus: Gpus = 8,
    seq: Seq = 8192,
    global_batch: GlobalBatch = 0,
    tokens: Annotated[str, typer.Option("--tokens", help="Of the whole training, such as 2T.")] = "1T",
    price: Annotated[str, typer.Option("--price", help="Of a GPU and an hour, such as 2.5/h.")] = "0",
    framework: Annotated[Framework | None, typer.Option("--framework", help=PROGRAMS)] = None,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of a prompt, for inference.")] = 1024,
    answer: Annotated[
        int | None, typer.Option("--answer", help="Tokens generated; plans inference instead of a training.")
    ] = None,
    load: Annotated[float, typer.Option("--load", help="Tokens a second to generate, for inference.")] = 0.0,
    rows: Annotated[Path | None, typer.Option("--rows", help="Predict the rows of a CSV file of measurements.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Compare two plans that --json printed.")
    ] = None,
    calibrate: Calibrate = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a page with pictures, such as plan.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict time, memory and cost of a training in BF16 and every FP8 recipe, each in its best layout.

    MFU is the model's FLOPs, recomputation not counted, as a share of the GPU's dense BF16 peak, in FP8 recipes too.
    """
    _refuse_without_effect(context, rows=rows, compare=compare, answer=answer)
    if report is not None:
        check_target("--report", report)
    if rows is not None:
        _predict_rows(rows, as_json=as_json)
    elif compare is not None:
        _show_comparison(*compare, as_json=as_json)
    elif model is None:
        raise ConfigError("name a model with --model, a file of measurements with --rows, or two plans with --compare")
    elif answer is not None:
        service = ServingRequest(
            model=load_shape(model),
            hardware=_accelerator(hardware),
            gpus=gpus,
            prompt=prompt,
            answer=answer,
            load=load,
            framework=framework or Framework.VLLM,
        )
        _show_service(service, as_json=as_json)
    else:
        request = PlanRequest(
            model=load_shape(model),
            hardware=_accelerator(hardware),
            gpus=gpus,
            seq=seq,
            global_batch=global_batch,
            tokens=_amount(tokens),
            price=_price(price),
            framework=framework or Framework.TITAN,
        )
        _show_plan(request, _constants(calibrate, request.hardware), report, as_json=as_json)


def _refuse_without_effect(
    context: typer.Context, *, rows: Path | None, compare: tuple[Path, Path] | None, answer: int | None
) -> None:
    """Raise ConfigError for an option that what is asked for does not use."""
    of_a_model = "training" if answer is None else "inference"
    task = "rows" if rows is not None else "compare" if compare is not None else of_a_model
    for name in context.params:
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and name not in USED[task] | {"as_json"}:
            raise ConfigError(f"--{name.replace('_', '-')} {WITHOUT_EFFECT[task]}; leave it out")


def advise_on_model(
    model: Annotated[str, typer.Argument(help="A model's name, its config.json, or a folder with one.")],
    *,
    hardware: Accelerator = "h100",
    gpus: Annotated[int, typer.Option("--gpus", help=f"{GPUS}.")] = 8,
    seq: Seq = 8192,
    global_batch: GlobalBatch = 0,
    framework: Annotated[
        Framework, typer.Option("--framework", help="Program that trains.", metavar=f"[{'|'.join(TRAINED_WITH)}]")
    ] = Framework.TITAN,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", help="Per cent of perplexity that may be lost.")
    ] = None,
    calibrate: Calibrate = None,
    as_json: Json = False,
) -> None:
    """Say whether to train a model in FP8, with which recipe, why, and what would change it."""
    request = PlanRequest(
        model=load_shape(model),
        hardware=_accelerator(hardware),
        gpus=gpus,
        seq=seq,
        global_batch=global_batch,
        framework=framework,
    )
    constants = _constants(calibrate, request.hardware)
    made = make_plan(request, constants)
    advice = advise(made, constants, tolerance=tolerance)
    if as_json:
        print_json(asdict(advice) | {"calibration": made.record()["calibration"]})
        return
    _show_answer(advice)
    changes = [f"What would change it: {change}" for change in advice.changes]
    print_lines(*(changes or [_unchanged(request, tolerance)]), _origin(made))


def _unchanged(request: PlanRequest, tolerance: float | None) -> str:
    """Sentence on what was tried and does not change the verdict."""
    if not request.hardware.has_fp8:
        return "With h100 or b200 in its place, FP8 would not be advised either."
    if tolerance is not None and tolerance < TOLERANCE:
        return (
            f"With a tolerance of {TOLERANCE:g} % FP8 would not be advised either; with {tolerance:g} %, it never is."
        )
    same = " with the same batch" if request.global_batch else ""
    return f"Nothing that was tried, and fits into memory, changes it: GPUs{same}, context, model, hardware, tolerance."


def _origin(made: Plan) -> str:
    """Measurements that a plan follows from."""
    return f"{made.calibrated_with}. {UNTRIED}" if made.calibrated_with else UNTRIED


def _show_answer(advice: Advice) -> None:
    """A verdict and what it rests on."""
    print_lines(advice.sentence, "")
    cells = [(each.name, HOLDS[each.holds], each.sentence) for each in advice.checks]
    print_table("Checks", ("check", "holds", ""), cells, left=3)
    if any("article" in each.sentence for each in advice.checks):
        print_lines(f"The article: {ARTICLE}.")


def _constants(calibration: Path | None, hardware: Hardware) -> Constants:
    """The fit's constants, with those of a GPU that was measured in their place."""
    constants = fitted_constants()
    if calibration is None:
        return constants
    return calibrated(constants, read_calibration(calibration, hardware), hardware, file=calibration.name)


def _accelerator(name: str) -> Hardware:
    """The accelerator of a name; ``cpu`` is this machine's, measured now."""
    return measure_cpu() if name.lower() == "cpu" else find_hardware(name)


def _amount(text: str) -> float:
    """A number with a suffix, such as 2T or 2.5."""
    match = re.fullmatch(r"\$?(\d+(?:\.\d+)?(?:e\d+)?) ?([kmbgt]?)", text.strip().lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a number such as 2.5, 300B or 2T")
    return float(match.group(1)) * SUFFIXES[match.group(2)]


def _price(text: str) -> float:
    """A price of a GPU and an hour, such as 2.5, $2.5/h or "2.5 per GPU-hour"."""
    amount = re.sub(r"(?:/| per )\s*(?:gpu[ -]?)?h(?:(?:ou)?rs?)?$", "", text.strip().lower())
    return _amount(amount.strip(" $€£"))


def _predict_rows(path: Path, *, as_json: bool) -> None:
    constants = fitted_constants()
    predictions = [predict_row(row, constants) for row in read_rows(path)]
    if as_json:
        print_json([asdict(each) for each in predictions])
        return
    cells = [
        (each.id, number(each.value), number(each.low), number(each.high), number(each.bf16_value), each.reason or "")
        for each in predictions
    ]
    print_table("Predictions", ("row", "value", "low", "high", "BF16", "not predicted because"), cells)


def _show_plan(request: PlanRequest, constants: Constants, report: Path | None, *, as_json: bool) -> None:
    started = time.perf_counter()
    made = make_plan(request, constants)
    seconds = time.perf_counter() - started
    if report is not None:
        from octavo.reports.plan import plan_page
        from octavo.reports.rendering import write_page

        write_page(report, plan_page(made))
    answer = advise(made)
    if as_json:
        record = {name: value for name, value in asdict(answer).items() if name != "changes"}
        print_json(made.record() | {"answer": record})
        return
    title = (
        f"{request.model.name}, {request.gpus:,} × {request.hardware.name}, {request.seq:,} tokens × {request.batch:,}"
    )
    columns = [name for name in COLUMNS if request.price or name != "cost"]
    cells = [_cells(option, record) for option, record in zip(made.options, made.record()["options"], strict=True)]
    print_table(title, columns, [[each.get(name, "–") for name in columns] for each in cells], left=3, whole=1)
    _show_shares(made)
    refused: dict[str, list[str]] = {}
    for option in made.options:
        if option.reason is not None:
            refused.setdefault(option.reason, []).append(option.name)
    print_lines(*(f"{', '.join(names)}: {reason}" for reason, names in refused.items()))
    _show_answer(answer)
    print_lines("octavo advise searches what would change it, and takes a --tolerance.")
    print_lines(f"Searched in {seconds:.1f} s, with the costs of {request.framework}. {_origin(made)}")


TIMES = ("step, s (80 %)", "tokens/s a GPU", "MFU", "memory", "days", "cost", "MWh", "× BF16")
COLUMNS = ("recipe", "layout", "recompute", *TIMES)


def _short(value: float | None) -> str:
    """Three digits, or all of a larger whole part: "8.67", "1,042"."""
    return number(value, 3) if value is None or abs(value) < 1000 else number(round(value))


def _cells(option: Option, record: dict[str, Any]) -> dict[str, str]:
    """Cells by column; an option that is refused has its name alone."""
    if option.candidate is None:
        return {"recipe": option.name}
    step, low, high = (_short(record[name]) for name in ("step_time_s", "step_time_low_s", "step_time_high_s"))
    gain = "1" if option.speedup is None else "{} ({}–{})".format(*map(speedup_text, option.speedup))
    return {
        "recipe": option.name,
        "layout": f"{record['layout']} mb{record['micro_batch']}",
        "recompute": option.candidate.recomputed,
        "step, s (80 %)": f"{step} ({low}–{high})",
        "tokens/s a GPU": number(round(record["tokens_per_s_per_gpu"])),
        "MFU": f"{record['mfu']:.0%}",
        "memory": f"{record['memory_gb']:.0f} GB",
        "days": _short(record["days"]),
        "cost": number(record["cost"] and round(record["cost"])),
        "MWh": _short(record["megawatt_hours"]),
        "× BF16": gain,
    }


def _show_shares(made: Plan) -> None:
    """Where the time goes, and which layers gain."""
    shown = [option for option in (made.options[0], made.best_fp8) if option is not None and option.candidate]
    names = [name for name in made.bf16.seconds if name != "total"]
    cells = []
    for name in names:
        seconds = [option.candidate.seconds for option in shown if option.candidate]
        cells.append((WORK[name], *(f"{each[name] / each['total']:.1%}" for each in seconds)))
    print_table("Where the time goes", ("", *(option.name for option in shown)), cells)
    layers = [
        (each.name, f"{each.share:.0%}", f"{each.speedup:.2f}", "" if each.speedup >= 1 else "keep in BF16")
        for each in made.layers
    ]
    if layers and made.best_fp8 is not None:
        print_table(f"Layers in FP8, with {made.best_fp8.name}", ("layer", "share of FLOPs", "× BF16", ""), layers)


def _show_service(service: ServingRequest, *, as_json: bool) -> None:
    points, refused = serving_points(service, fitted_constants())
    if as_json:
        record = {"framework": service.framework, "points": [point.record() for point in points]}
        print_json(record | {"refused": refused, "answer": " ".join(serving_answer(points))})
        return
    cells = [
        (
            point.precision,
            number(point.prompt),
            number(point.requests),
            _short(point.token_ms),
            _short(point.first_token_ms),
            f"{_short(point.tokens_per_s)} ({_short(point.low)} to {_short(point.high)})",
            f"{point.weights_gb:.0f} GB",
            f"{point.kv_gb:.1f} GB",
            number(point.gpus_needed or None),
        )
        for point in points
    ]
    columns = (
        "precision",
        "prompt",
        "requests",
        "ms a token",
        "ms to the first",
        "tokens/s",
        "weights",
        "KV",
        "GPUs needed",
    )
    is_cpu = service.hardware.generation == "cpu"
    title = f"{service.model.name}, {service.gpus} × {service.hardware.name}, {service.prompt}/{service.answer} tokens"
    print_table(title, columns, cells)
    print_lines(
        *(f"{name}: {reason}" for name, reason in refused.items()),
        *serving_answer(points),
        *(["No measurement is of a CPU: a server's costs there are those on GPUs."] if is_cpu else []),
        f"As {service.framework} would serve. Predicted from published measurements of TensorRT-LLM and vLLM; octavo's "
        "own server was not among them.",
    )


def _show_comparison(first: Path, second: Path, *, as_json: bool) -> None:
    plans = {path: read_plan(path) for path in (first, second)}
    differences = compare_plans(plans[first], plans[second])
    if as_json:
        print_json([asdict(each) for each in differences])
        return
    cells = [
        (
            each.recipe,
            *(f"{_short(pair[0])} → {_short(pair[1])}" for pair in (each.step_time_s, each.days, each.memory_gb)),
            f"{each.times_as_fast:.2f}",
        )
        for each in differences
    ]
    title = " → ".join(_named(path, record) for path, record in plans.items())
    print_table(title, ("recipe", "step, s", "days", "memory, GB", "times as fast"), cells)
    compared = {each.recipe for each in differences}
    for path, record in plans.items():
        alone = [option["recipe"] for option in record["options"] if option.get("reason") is None]
        alone = [name for name in alone if name not in compared]
        if alone:
            print_lines(f"In {path.name} alone: {', '.join(alone)}")


def _named(path: Path, record: dict[str, Any]) -> str:
    """A plan's file, and of what it is."""
    calibration = record.get("calibration")
    measured = f", calibrated with {calibration.get('file')}" if isinstance(calibration, dict) else ""
    return f"{path.name} ({record.get('model')}, {record['gpus']:,} × {record.get('hardware')}{measured})"
