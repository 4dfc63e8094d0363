"""``octavo export``: write a language model in FP8 for other programs, and verify it."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.checkpoints import FORMATS
from octavo.cli import options
from octavo.cli.export_checkpoint import write_checkpoint
from octavo.cli.export_graph import write_graph
from octavo.cli.export_job import TRITON, CheckpointOptions, GraphOptions, Job, Writer
from octavo.cli.export_repository import write_triton
from octavo.errors import ConfigError
from octavo.export.checkpoint_writer import DTYPES
from octavo.export.engine_format import engine_to_write_for, format_of_engine
from octavo.export.sources import ONNX, ConversionOptions
from octavo.models.sources import located
from octavo.onnx import OPSETS

__all__ = ["export"]

DEFAULT = "compressed-tensors"
WRITERS: dict[str, Writer] = {**dict.fromkeys(FORMATS, write_checkpoint), ONNX: write_graph, TRITON: write_triton}


def export(
    *,
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write, new or empty.")],
    format_: Annotated[
        str | None, typer.Option("--format", help=f"Format: {', '.join(WRITERS)}. [default: compressed-tensors]")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="ENGINE",
            help="Write the codes and scales of an engine, vllm, sglang or any of octavo agree, in a format it reads.",
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Preset, such as rowwise, blockwise or weight_only. [default: by the format]")
    ] = None,
    power_of_two: Annotated[
        bool, typer.Option("--power-of-two", help="Round the recipe's scales to powers of two.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of octavo calibrate: static scales; with a recipe of dynamic scales, its KV cache's alone.",
        ),
    ] = None,
    mix: Annotated[Path | None, typer.Option(metavar="FILE", help="mix.toml of octavo sensitivity.")] = None,
    skip: options.Skip = None,
    head: options.Head = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Dtype of other tensors: {', '.join(DTYPES)}. [default: bf16, or that of an FP8 folder; onnx: fp16]"
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes of a checkpoint file, such as 500MB. [default: 5GB]")
    ] = None,
    fnuz: Annotated[
        bool, typer.Option("--fnuz", help="Write a checkpoint's codes in AMD's FNUZ formats, with doubled scales.")
    ] = False,
    verify: Annotated[bool, typer.Option(help="Read a checkpoint back in a new process and compare logits.")] = True,
    device: options.Device = None,
    opset: Annotated[
        int | None, typer.Option(help=f"onnx: opset {' or '.join(map(str, OPSETS))}. [default: {OPSETS[0]}]")
    ] = None,
    kv_cache: Annotated[
        bool, typer.Option("--kv-cache", help="onnx: add inputs and outputs for cached keys and values.")
    ] = False,
    attention: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="onnx: also run attention in FP8, with scales from this text source."),
    ] = None,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="onnx: store weights in a separate file; always so above 2 GB.")
    ] = False,
    tensorrt: Annotated[
        bool,
        typer.Option(
            "--tensorrt", help="onnx: add scripts that build and time an engine; check with TensorRT-RTX if installed."
        ),
    ] = False,
    max_batch: Annotated[int | None, typer.Option(help="--tensorrt: largest batch. [default: 16]")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="--tensorrt: most tokens per sequence. [default: 1024, or the model's context]")
    ] = None,
    hub: options.Hub = False,
    as_json: options.Json = False,
) -> None:
    """Write a language model in FP8 for other programs, and verify that it computes the same there."""
    if hub:
        located(model, hub=True)
    engine = None if for_ is None else engine_to_write_for(for_)
    if engine is not None and format_ is not None:
        raise ConfigError("--for chooses the format; leave --format out")
    if engine is not None and fnuz:
        raise ConfigError("--for writes the codes that its engine reads, OCP's even for vllm-fnuz; leave --fnuz out")
    written = format_ or (DEFAULT if engine is None else format_of_engine(engine))
    request = ConversionOptions(
        recipe=recipe,
        power_of_two=power_of_two,
        calibration=calibration,
        mix=mix,
        skip=tuple(skip or ()),
        convert_head=head,
        engine=engine,
    )
    job = Job(
        model=model,
        out=out,
        format=written,
        request=request,
        dtype=dtype,
        checkpoint=CheckpointOptions(max_shard_size=max_shard_size, device=device, no_verify=not verify, fnuz=fnuz),
        graph=GraphOptions(
            opset=opset,
            kv_cache=kv_cache,
            attention=attention,
            external_data=external_data,
            tensorrt=tensorrt,
            max_batch=max_batch,
            max_length=max_length,
        ),
    )
    WRITERS[written](job, as_json=as_json)
