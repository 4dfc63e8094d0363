"""FP8 ONNX graphs of ``octavo export``: write, check with other engines, and print the results."""

from collections import Counter
from dataclasses import replace

from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.export_job import Job
from octavo.cli.progress import open_display, phases
from octavo.export.sources import ONNX, ExportSource, load_source
from octavo.files import claimed_folder
from octavo.onnx import OPSETS, OnnxOptions, OnnxReport, check_packages, export_onnx
from octavo.quantization import text_windows
from octavo.text.corpus import Split

__all__ = ["graph_options", "load_graph_source", "write_graph"]

WINDOWS, LENGTH = 8, 128  # of the text that attention's scales come from
NAMED = 3  # layers of each kind that a table names


def write_graph(job: Job, *, as_json: bool) -> None:
    """Write a folder with an ONNX graph and print a summary."""
    onnx_options = graph_options(job)
    with claimed_folder(job.out), open_display() as display:
        show = phases(display)
        show("load", 0, None)
        source, onnx_options = load_graph_source(job, onnx_options)
        report = export_onnx(
            source.language_model,
            job.out,
            options=onnx_options,
            calibration=source.calibration,
            on_step=lambda step: show(step, 0, None),
        )
    notes = _notes(onnx_options, has_scales=bool(source.kv_scales))
    if as_json:
        print_json({**report.to_record(), "folder": str(report.folder), "notes": notes})
    else:
        _print(report, notes)


def graph_options(job: Job) -> OnnxOptions:
    """Return a job's graph options without attention, which needs the model."""
    check_packages()
    job_options = job.graph
    return OnnxOptions(
        opset=OPSETS[0] if job_options.opset is None else job_options.opset,
        dtype=job.dtype or "fp16",
        kv_cache=job_options.kv_cache,
        external_data=job_options.external_data,
        tensorrt=job_options.tensorrt,
        max_batch=job_options.max_batch,
        max_length=job_options.max_length,
    )


def load_graph_source(job: Job, onnx_options: OnnxOptions) -> tuple[ExportSource, OnnxOptions]:
    """Load a job's model for a graph; the options then hold attention's text in the model's tokens."""
    source = load_source(job.model, ONNX, job.request)
    if job.graph.attention is None:
        return source, onnx_options
    model = source.language_model
    windows = text_windows(model, job.graph.attention, Split.TRAIN, count=WINDOWS, length=min(LENGTH, model.context))
    return source, replace(onnx_options, attention=windows)


def _notes(onnx_options: OnnxOptions, *, has_scales: bool) -> list[str]:
    if not has_scales:
        return []
    cache = f"its cache is in {onnx_options.dtype}" if onnx_options.kv_cache else "it has no cache"
    return [f"the graph does not use the model's scales of keys and values: {cache}"]


def _print(report: OnnxReport, notes: list[str]) -> None:
    print_table(str(report.folder), ["inputs", "weights", "layers", ""], _layers(report), left=3)
    columns = [
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
    print_table("The graph's results against torch's", columns, rows)
    lines = [str(each) for each in report.engines if each.skipped]
    lines += [str(report.build)] if report.build else []
    print_lines(
        *lines,
        f"{report.fp8_layers} of {len(report.layers)} linear layers in FP8; opset {report.opset}, {report.dtype}",
        f"in torch, layers are within {report.layer_error:.1e} of the model's, results within {report.model_error:.1e}",
        f"{number(report.file_bytes)} bytes of graph and weights, {report.bytes.fp8_share:.0%} of the constants' FP8; "
        f"files: {', '.join(report.files)}",
        *(f"note: {note}" for note in notes),
    )


def _layers(report: OnnxReport) -> list[tuple[str, str, str, str]]:
    """One row per combination of input format, weight format and reason for not using FP8."""
    kinds = Counter((note.input, note.weight, note.reason) for note in report.layers)
    rows = []
    for (inputs, weights, reason), count in kinds.items():
        paths = [
            note.path for note in report.layers if (note.input, note.weight, note.reason) == (inputs, weights, reason)
        ]
        listed_paths = ", ".join(paths[:NAMED]) + (", …" if len(paths) > NAMED else "")
        rows.append((inputs, weights, f"{reason}: {listed_paths}" if reason else "in FP8", number(count)))
    return rows
