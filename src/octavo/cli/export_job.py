"""What ``octavo export`` is asked for, and which of its options belong to which format."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from octavo.checkpoints import FORMATS
from octavo.errors import ConfigError
from octavo.export.sources import ONNX, Request
from octavo.numerics.cast_spec import check_member

__all__ = ["TRITON", "CheckpointOptions", "GraphOptions", "Job", "Writer"]

TRITON = "triton"  # a checkpoint and a graph


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Options of a folder of safetensors; the defaults say that nothing was asked for.

    Attributes:
        max_shard_size: of a file, in words.
        device: where the model computes.
        no_verify: nobody reads the folder back.
    """

    max_shard_size: str | None = None
    device: str | None = None
    no_verify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Options of an ONNX graph; the defaults say that nothing was asked for.

    Attributes:
        opset: of its operators.
        kv_cache: inputs and outputs for keys and values.
        attention: the text that the scales of attention's operands come from, which are FP8 then.
        external_data: weights in a file of their own.
        tensorrt: scripts that build and time an engine.
        max_batch: the largest of that engine.
        max_length: the most tokens of a text in that engine.
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
    """What is to be written where.

    Attributes:
        model: where it is.
        out: the folder.
        format: a format's name.
        request: how the layers run.
        dtype: of what is not FP8; None leaves it to the format.
        checkpoint: what belongs to checkpoints.
        graph: what belongs to graphs.

    Raises:
        ConfigError: there is no such format, or options of another one are given.
    """

    model: str
    out: Path
    format: str
    request: Request
    dtype: str | None
    checkpoint: CheckpointOptions
    graph: GraphOptions

    def __post_init__(self) -> None:
        check_member("--format", self.format, (*FORMATS, ONNX, TRITON))
        if self.format == TRITON:
            if self.graph.tensorrt:
                raise ConfigError("--format triton has TensorRT's scripts always; leave out --tensorrt")
            return
        others, of = (self.checkpoint, ", ".join(FORMATS)) if self.format == ONNX else (self.graph, ONNX)
        for option in _given(others):
            raise ConfigError(f"--{option} belongs to --format {of}, not to {self.format}; leave it out")


def _given(options: CheckpointOptions | GraphOptions) -> list[str]:
    """The options that are not as they were, by their names on the command line."""
    names = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    return [name.replace("_", "-") for name in names]


class Writer(Protocol):
    """Writes a job's model in a format, and prints what it wrote."""

    def __call__(self, job: Job, *, as_json: bool) -> None:
        """Do both."""
