"""An ONNX graph in FP8 by ``octavo export``: written, run by two engines, and what they found."""

from collections import Counter
from dataclasses import replace

from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.export_job import Job
from octavo.cli.progress import Display, open_display
from octavo.export.sources import ONNX, ExportSource, load_source
from octavo.files import claimed_folder
from octavo.onnx import OPSETS, OnnxOptions, OnnxReport, check_packages, export_onnx
from octavo.quantization import text_windows
from octavo.text.corpus import Split

__all__ = ["graph_options", "load_graph_source", "write_graph"]

WINDOWS, LENGTH = 8, 128  # of the text that attention's scales come from
NAMED = 3  # layers of each kind that a table names


def write_graph(job: Job, *, as_json: bool) -> None:
    """Write a folder with an ONNX graph, and tell."""
    asked = graph_options(job)
    with claimed_folder(job.out), open_display() as display:
        display.phase("load", None)
        source, asked = load_graph_source(job, asked)
        report = export_onnx(
            source.language_model,
            job.out,
            options=asked,
            calibration=source.calibration,
            on_step=lambda step: _open(display, step),
        )
    notes = _notes(asked, has_scales=bool(source.kv_scales))
    if as_json:
        print_json({**report.to_record(), "folder": str(report.folder), "notes": notes})
    else:
        _print(report, notes)


def _open(display: Display, step: str) -> None:
    display.phase(step, None)


def graph_options(job: Job) -> OnnxOptions:
    """What a job says of its graph, but for attention, which needs the model; refused before one is read."""
    check_packages()
    given = job.graph
    return OnnxOptions(
        opset=OPSETS[0] if given.opset is None else given.opset,
        dtype=job.dtype or "fp16",
        kv_cache=given.kv_cache,
        external_data=given.external_data,
        tensorrt=given.tensorrt,
        max_batch=given.max_batch,
        max_length=given.max_length,
    )


def load_graph_source(job: Job, asked: OnnxOptions) -> tuple[ExportSource, OnnxOptions]:
    """A job's model as it becomes a graph, and the options with attention's text in the model's tokens."""
    source = load_source(job.model, ONNX, job.request)
    if job.graph.attention is None:
        return source, asked
    model = source.language_model
    windows = text_windows(model, job.graph.attention, Split.TRAIN, count=WINDOWS, length=min(LENGTH, model.context))
    return source, replace(asked, attention=windows)


def _notes(asked: OnnxOptions, *, has_scales: bool) -> list[str]:
    if not has_scales:
        return []
    cache = f"its cache is in {asked.dtype}" if asked.kv_cache else "it has no cache"
    return [f"the scales of keys and values that came with the model are not in the graph: {cache}"]


def _print(report: OnnxReport, notes: list[str]) -> None:
    print_table(str(report.folder), ["inputs", "weights", "layers", ""], _layers(report), left=3)
    header = [
        "checked by",
        "casts",
        "codes",
        "not octavo's",
        "scales not octavo's",
        "error, same codes",
        "free-running",
    ]
    rows = [
        (
            each.engine,
            *map(number, (each.casts, each.codes, each.wrong_codes, each.wrong_scales)),
            f"{each.error:.1e} (at most {each.allowed:.0e})",
            f"{each.free_error:.1e}",
        )
        for each in report.engines
        if not each.skipped
    ]
    print_table("The graph's results beside torch's", header, rows)
    lines = [str(each) for each in report.engines if each.skipped]
    lines += [str(report.build)] if report.build else []
    lines.append(
        f"{report.fp8_layers} of {len(report.layers)} linear layers in FP8; opset {report.opset}, {report.dtype}"
    )
    lines.append(
        f"in torch, layers are within {report.layer_error:.1e} of the model's, results {report.model_error:.1e}"
    )
    lines.append(
        f"{number(report.file_bytes)} bytes of graph and weights, {report.bytes.fp8_share:.0%} of the constants' FP8; "
        f"files: {', '.join(report.files)}"
    )
    stdout().print("\n".join([*lines, *(f"note: {note}" for note in notes)]), markup=False, soft_wrap=True)


def _layers(report: OnnxReport) -> list[tuple[str, str, str, str]]:
    """A row for each way in which layers are computed and, where they are not in FP8, each reason."""
    kinds = Counter((note.input, note.weight, note.reason) for note in report.layers)
    rows = []
    for (inputs, weights, reason), count in kinds.items():
        paths = [
            note.path for note in report.layers if (note.input, note.weight, note.reason) == (inputs, weights, reason)
        ]
        named = ", ".join(paths[:NAMED]) + (", …" if len(paths) > NAMED else "")
        rows.append((inputs, weights, f"{reason}: {named}" if reason else "in FP8", number(count)))
    return rows
