"""Files for TensorRT beside a graph: commands for its versions 10 and 11, a script for its Python API.

| file              | content                                                                                    |
|-------------------|--------------------------------------------------------------------------------------------|
| build.sh          | ``trtexec`` with shapes, which writes the engine; adds ``--stronglyTyped`` if the          |
|                   | installed version has that option                                                          |
| benchmark.sh      | ``trtexec`` on the engine                                                                  |
| build_engine.py   | builds the same engine with the Python API                                                 |
| calibration.json  | source of the static scales; only for a calibrated model                                   |

The graph's Q and DQ nodes determine what is FP8 (explicit quantization), so the network is strongly typed. TensorRT 11
supports no other networks and has no ``--stronglyTyped``, ``--fp8`` and ``--calib``. Writing these files does not need
TensorRT; octavo has not run them on a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from octavo.errors import ConfigError
from octavo.onnx.graph import BATCH, PAST, SEQUENCE, Graph

__all__ = [
    "ENGINE",
    "LARGEST_BATCH",
    "MODEL",
    "USUAL_BATCH",
    "ShapeRange",
    "benchmark_command",
    "build_command",
    "shape_ranges",
    "tensorrt_files",
]

MODEL, ENGINE = "model.onnx", "model.engine"
LARGEST_BATCH, LARGEST_LENGTH = 16, 1024  # logits of 16 x 1,024 tokens and 50,000 token ids: 1.6 GB in 16 bits
USUAL_BATCH, USUAL_LENGTH = 16, 64  # the source article's
POINTS = ("min", "opt", "max")
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRange:
    """Smallest, optimal and largest shape of one input of an engine."""

    name: str
    min: Sizes
    opt: Sizes
    max: Sizes


def shape_ranges(
    graph: Graph, *, context: int | None, max_batch: int | None = None, max_length: int | None = None
) -> tuple[ShapeRange, ...]:
    """Shape ranges of the graph's inputs.

    TensorRT plans memory for the largest shapes, and the build fails if a GPU has less: the logits of 32 texts of 8,192
    tokens and 50,000 token ids take 26 GB. The default largest shapes fit usual GPUs.

    With a cache the engine is tuned for one new token. A range limits one dimension, so it cannot express that past and
    new tokens together must stay within the context: the caller has to ensure this.

    Args:
        graph: the exported graph.
        context: maximum number of tokens of the model; None if unknown.
        max_batch: largest batch; None means 16.
        max_length: largest number of tokens of a text, and with a cache of past and new tokens; None means 1,024, or
            the context if that is smaller.

    Raises:
        ConfigError: ``max_length`` is more than the context.
    """
    longest = max_length or min(LARGEST_LENGTH, context or LARGEST_LENGTH)
    if context is not None and longest > context:
        raise ConfigError(f"max_length is {longest}, and the model reads at most {context} tokens; give no more")
    most = max_batch or LARGEST_BATCH
    has_cache = any(PAST in shape.values() for shape in graph.shapes)
    usual, usual_past = min(USUAL_LENGTH, longest), min(USUAL_LENGTH, longest - 1)
    points: dict[str, Mapping[str, int]] = {
        "min": {BATCH: 1, SEQUENCE: 1, PAST: 0},
        "opt": {BATCH: min(USUAL_BATCH, most), SEQUENCE: 1 if has_cache else usual, PAST: usual_past},
        "max": {BATCH: most, SEQUENCE: longest, PAST: longest - 1},
    }
    ranges = []
    for name, tensor, varying in zip(graph.names, graph.inputs, graph.shapes, strict=True):
        sizes = {
            point: tuple(named[varying[i]] if i in varying else size for i, size in enumerate(tensor.shape))
            for point, named in points.items()
        }
        ranges.append(ShapeRange(name=name, **sizes))
    return tuple(ranges)


def build_command(ranges: tuple[ShapeRange, ...], *, version: int) -> str:
    """Return the ``trtexec`` command for TensorRT 10 or 11.

    Example:
        >>> ids = ShapeRange(name="input_ids", min=(1, 1), opt=(16, 64), max=(32, 512))
        >>> build_command((ids,), version=11).split()[:3]
        ['trtexec', '--onnx=model.onnx', '--saveEngine=model.engine']
    """
    typed = ["--stronglyTyped"] if version < 11 else []
    shapes = [f"--{point}Shapes={_shapes(ranges, point)}" for point in POINTS]
    return " ".join(["trtexec", f"--onnx={MODEL}", *typed, f"--saveEngine={ENGINE}", *shapes])


def benchmark_command(ranges: tuple[ShapeRange, ...]) -> str:
    """Return the ``trtexec`` command that times the optimal shapes; the same for both versions."""
    return f"trtexec --loadEngine={ENGINE} --shapes={_shapes(ranges, 'opt')} --warmUp=100 --duration=30"


def tensorrt_files(ranges: tuple[ShapeRange, ...]) -> dict[str, str]:
    """Text of each script, by file name."""
    build = Template(_BUILD).substitute(ten=build_command(ranges, version=10), eleven=build_command(ranges, version=11))
    profile = "\n".join(f"    {each.name!r}: ({each.min}, {each.opt}, {each.max})," for each in ranges)
    return {
        "build.sh": build,
        "benchmark.sh": f"#!/bin/sh\nset -e\n{benchmark_command(ranges)}\n",
        "build_engine.py": Template(_BUILD_ENGINE).substitute(profile=profile, model=MODEL, engine=ENGINE),
    }


def _shapes(ranges: tuple[ShapeRange, ...], point: str) -> str:
    return ",".join(f"{each.name}:{'x'.join(map(str, getattr(each, point)))}" for each in ranges)


_BUILD = """#!/bin/sh
# TensorRT 10 has to be told that the network is strongly typed; TensorRT 11 has no other and refuses the option.
set -e
if trtexec --help | grep -q stronglyTyped; then
    $ten
else
    $eleven
fi
"""

_BUILD_ENGINE = '''"""Build $engine from $model by TensorRT's Python API: python build_engine.py (TensorRT 10 or 11)."""

import sys

import tensorrt as trt

PROFILE = {  # input: smallest, tuned for, largest shape
$profile
}


def main() -> None:
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    flags = 0
    if int(trt.__version__.split(".")[0]) < 11:  # later networks are strongly typed without being told
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file("$model"):
        sys.exit("\\n".join(str(parser.get_error(index)) for index in range(parser.num_errors)))
    profile = builder.create_optimization_profile()
    for name, shapes in PROFILE.items():
        profile.set_shape(name, *shapes)
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        sys.exit("TensorRT built no engine; its log above says why")
    with open("$engine", "wb") as file:
        file.write(engine)


if __name__ == "__main__":
    main()
'''
