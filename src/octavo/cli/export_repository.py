"""Triton model repositories of ``octavo export``: a checkpoint, a graph, and Triton's configuration."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from octavo.cli import options
from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.export_checkpoint import size_of, verdict
from octavo.cli.export_graph import graph_options, load_graph_source
from octavo.cli.export_job import Job
from octavo.cli.progress import open_display, phases
from octavo.cli.serve import check_server_packages
from octavo.export.sources import ConversionOptions, load_source

if TYPE_CHECKING:
    from octavo.server.triton.repository import Repository

__all__ = ["write_triton"]

CHECKPOINT = "compressed-tensors"  # octavo's engine and vLLM read it


def write_triton(job: Job, *, as_json: bool) -> None:
    """Write a repository and print a summary; a requested recipe applies to the graph, the engine has its own."""
    check_server_packages()
    from octavo.server.triton.repository import write_repository

    graph_settings = replace(graph_options(job), tensorrt=True)
    place = options.device_of(job.checkpoint.device)
    with open_display() as display:
        repository = write_repository(
            job.out,
            engine=lambda: load_source(job.model, CHECKPOINT, ConversionOptions(), device=place),
            graph=lambda: load_graph_source(job, graph_settings),
            max_shard_bytes=size_of(job.checkpoint.max_shard_size or "5GB"),
            verify=not job.checkpoint.no_verify,
            on_phase=phases(display),
        )
    if as_json:
        print_json(_record(repository))
    else:
        _print(repository)


def _record(repository: "Repository") -> dict[str, Any]:
    graph = {key: value for key, value in repository.graph.to_record().items() if key != "folder"}
    agreement = repository.engine.agreement
    return {
        "folder": str(repository.folder),
        "models": repository.models,
        "other_backends": repository.others,
        "checkpoint": {
            "schemes": repository.engine.schemes,
            "bytes": repository.engine.nbytes,
            "agreement": None if agreement is None else asdict(agreement),
        },
        "graph": graph,
    }


def _print(repository: "Repository") -> None:
    engine, graph = repository.engine, repository.graph
    layers = f"{graph.fp8_layers} of {len(graph.layers)} layers in FP8, the rest {graph.dtype}"
    rows = [
        ("octavo, octavo_whole", "octavo's engine", number(engine.nbytes)),
        ("onnx", f"onnxruntime: {layers}", number(graph.file_bytes)),
    ]
    print_table(str(repository.folder), ["models", "runs", "bytes"], rows, left=2)
    print_lines(
        f"the checkpoint: {verdict(engine)}",
        f"for servers with other backends: {', '.join(repository.others)}; see README.md there",
        f"octavo triton setup, then: octavo serve {repository.folder} --engine triton",
    )
