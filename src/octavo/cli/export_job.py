"""Options of ``octavo export``, by format."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from octavo.checkpoints import FORMATS
from octavo.errors import ConfigError
from octavo.export.sources import ONNX, ConversionOptions
from octavo.numerics.cast_spec import check_member

__all__ = ["TRITON", "CheckpointOptions", "GraphOptions", "Job", "Writer"]

TRITON = "triton"  # a checkpoint and a graph


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Options of a folder of safetensors; a default means that the option was not given.

    Attributes:
        max_shard_size: most bytes of a file, such as ``"500MB"``.
        device: device of the model.
        no_verify: skip the verification.
        fnuz: write FNUZ codes.
    """

    max_shard_size: str | None = None
    device: str | None = None
    no_verify: bool = False
    fnuz: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Options of an ONNX graph; a default means that the option was not given.

    Attributes:
        opset: ONNX operator set.
        kv_cache: add inputs and outputs for cached keys and values.
        attention: text source for the scales of FP8 attention; None leaves attention in high precision.
        external_data: store weights in a separate file.
        tensorrt: add scripts that build and time an engine.
        max_batch: largest batch of that engine.
        max_length: most tokens per sequence in that engine.
    """

    opset: int | None = None
    kv_cache: bool = False
    attention: str | None = None
    external_data: bool = False
    tensorrt: bool = False
    max_batch: int | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One export: model, folder, format and options.

    Attributes:
        model: path or name of the model.
        out: folder to write.
        format: name of the format.
        request: recipes of the layers.
        dtype: dtype of tensors that are not FP8; None is the format's default.
        checkpoint: options of checkpoints.
        graph: options of graphs.

    Raises:
        ConfigError: an unknown format, or options of another format.
    """

    model: str
    out: Path
    format: str
    request: ConversionOptions
    dtype: str | None
    checkpoint: CheckpointOptions
    graph: GraphOptions

    def __post_init__(self) -> None:
        check_member("--format", self.format, (*FORMATS, ONNX, TRITON))
        if self.format == TRITON:
            if self.graph.tensorrt:
                raise ConfigError("--format triton always includes TensorRT's scripts; leave out --tensorrt")
            if self.checkpoint.fnuz:
                raise ConfigError(
                    "--format triton has OCP codes, which onnxruntime and TensorRT read; leave out --fnuz"
                )
            return
        others, of = (self.checkpoint, ", ".join(FORMATS)) if self.format == ONNX else (self.graph, ONNX)
        for option in _changed_options(others):
            raise ConfigError(f"--{option} belongs to --format {of}, not to {self.format}; leave it out")


def _changed_options(options: CheckpointOptions | GraphOptions) -> list[str]:
    """Return the command-line names of options that differ from their defaults."""
    names = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    return [name.replace("_", "-") for name in names]


class Writer(Protocol):
    """Callable that writes a job's model in one format and prints a summary."""

    def __call__(self, job: Job, *, as_json: bool) -> None:
        """Write and print."""
