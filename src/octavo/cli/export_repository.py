"""A model repository for Triton by ``octavo export``: a checkpoint, a graph, and what Triton needs around them."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from octavo.cli import options
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.export_checkpoint import size_of, verdict
from octavo.cli.export_graph import graph_options, load_graph_source
from octavo.cli.export_job import Job
from octavo.cli.progress import open_display, phases
from octavo.cli.serve import check_server_packages
from octavo.export.sources import Request, load_source

if TYPE_CHECKING:
    from octavo.server.triton.repository import Repository

__all__ = ["write_triton"]

CHECKPOINT = "compressed-tensors"  # octavo's engine and vLLM read it


def write_triton(job: Job, *, as_json: bool) -> None:
    """Write a repository, and tell. How layers run, if it is said, is for the graph: the engine has one recipe."""
    check_server_packages()
    from octavo.server.triton.repository import write_repository

    asked = replace(graph_options(job), tensorrt=True)
    place = options.device_of(job.checkpoint.device)
    with open_display() as display:
        made = write_repository(
            job.out,
            engine=lambda: load_source(job.model, CHECKPOINT, Request(), device=place),
            graph=lambda: load_graph_source(job, asked),
            max_shard_bytes=size_of(job.checkpoint.max_shard_size or "5GB"),
            verify=not job.checkpoint.no_verify,
            on_phase=phases(display),
        )
    if as_json:
        print_json(_record(made))
    else:
        _print(made)


def _record(made: "Repository") -> dict[str, Any]:
    graph = {key: value for key, value in made.graph.to_record().items() if key != "folder"}
    agreement = made.engine.agreement
    return {
        "folder": str(made.folder),
        "models": made.models,
        "other_backends": made.others,
        "checkpoint": {
            "schemes": made.engine.schemes,
            "bytes": made.engine.nbytes,
            "agreement": None if agreement is None else asdict(agreement),
        },
        "graph": graph,
    }


def _print(made: "Repository") -> None:
    engine, graph = made.engine, made.graph
    layers = f"{graph.fp8_layers} of {len(graph.layers)} layers in FP8, the rest {graph.dtype}"
    rows = [
        ("octavo, octavo_whole", "octavo's engine", number(engine.nbytes)),
        ("onnx", f"onnxruntime: {layers}", number(graph.file_bytes)),
    ]
    print_table(str(made.folder), ["models", "runs", "bytes"], rows, left=2)
    lines = [
        f"the checkpoint: {verdict(engine)}",
        f"for servers with other backends: {', '.join(made.others)}; README.md there says how",
        f"octavo triton setup, then: octavo serve {made.folder} --engine triton",
    ]
    stdout().print("\n".join(lines), markup=False, soft_wrap=True)
