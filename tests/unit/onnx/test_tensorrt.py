"""The commands and scripts, run against stand-ins for trtexec and tensorrt that write down what they are asked."""

import os
import subprocess
import sys

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.onnx.graph import graph_of_decoder
from octavo.onnx.tensorrt import ShapeRange, benchmark_command, build_command, shape_ranges, tensorrt_files
from tests.unit.quantization.tiny_models import language_model

SOURCE = language_model()
octavo.convert(SOURCE.model, "tensorwise")
RANGES = (
    ShapeRange(name="input_ids", min=(1, 1), opt=(16, 1), max=(32, 512)),
    ShapeRange(name="past_key_values.0.key", min=(1, 3, 0, 64), opt=(16, 3, 64, 64), max=(32, 3, 511, 64)),
)
SHAPES = (
    "--minShapes=input_ids:1x1,past_key_values.0.key:1x3x0x64 "
    "--optShapes=input_ids:16x1,past_key_values.0.key:16x3x64x64 "
    "--maxShapes=input_ids:32x512,past_key_values.0.key:32x3x511x64"
)
TEN = f"--onnx=model.onnx --stronglyTyped --saveEngine=model.engine {SHAPES}"
ELEVEN = f"--onnx=model.onnx --saveEngine=model.engine {SHAPES}"

TENSORRT = """
import json
__version__ = {version!r}
said = []
class NetworkDefinitionCreationFlag: STRONGLY_TYPED = 1
class Logger:
    WARNING = 0
    def __init__(self, level): pass
class Profile:
    def set_shape(self, *given): said.append(given)
class Config:
    def add_optimization_profile(self, profile): said.append("profile")
class Builder:
    def __init__(self, logger): pass
    def create_network(self, flags): said.append(flags)
    def create_optimization_profile(self): return Profile()
    def create_builder_config(self): return Config()
    def build_serialized_network(self, network, config): return {engine}
class OnnxParser:
    num_errors = 1
    def __init__(self, network, logger): pass
    def parse_from_file(self, name):
        said.append(name)
        open("said.json", "w").write(json.dumps(said))
        return {parsed}
    def get_error(self, index): return "this operator is unknown"
"""


@pytest.fixture(scope="module")
def cached():
    return graph_of_decoder(SOURCE, torch.float32, has_cache=True, attention=None)


@pytest.mark.parametrize("context", [1, 2, 63, 64, 65, 512, 8192, None])
def test_ranges_lie_within_the_context(cached, context):
    ranges = shape_ranges(cached, context=context)
    longest = min(1024, context or 1024)
    for each in ranges:
        assert all(least <= usual <= most for least, usual, most in zip(each.min, each.opt, each.max, strict=True))
    tokens, past = ranges[0], ranges[1]
    assert tokens.max[1] == longest
    assert past.max[2] + tokens.min[1] == longest
    assert past.opt[2] + tokens.opt[1] <= longest  # what is tuned and timed can be run


def test_the_largest_shapes_are_bounded_unless_asked(cached):
    tokens, past = shape_ranges(cached, context=8192)[:2]
    assert (tokens.opt, tokens.max) == ((16, 1), (16, 1024))
    assert past.max[::2] == (16, 1023)
    tokens, past = shape_ranges(cached, context=8192, max_batch=2, max_length=8192)[:2]
    assert (tokens.opt, tokens.max) == ((2, 1), (2, 8192))
    assert past.max[::2] == (2, 8191)
    tokens, past = shape_ranges(cached, context=8192, max_length=16)[:2]
    assert (past.opt[2], past.max[2]) == (15, 15)
    with pytest.raises(ConfigError, match="max_length is 65, and the model reads at most 64 tokens"):
        shape_ranges(cached, context=64, max_length=65)


def test_trtexec_commands():
    assert build_command(RANGES, version=10) == f"trtexec {TEN}"
    assert build_command(RANGES, version=11) == f"trtexec {ELEVEN}"
    assert benchmark_command(RANGES) == (
        "trtexec --loadEngine=model.engine --shapes=input_ids:16x1,past_key_values.0.key:16x3x64x64 "
        "--warmUp=100 --duration=30"
    )


@pytest.mark.parametrize(("version", "wanted"), [(10, TEN), (11, ELEVEN)])
def test_build_script_passes_strongly_typed_only_to_versions_that_have_it(tmp_path, version, wanted):
    for name, text in tensorrt_files(RANGES).items():
        (tmp_path / name).write_text(text)
    help_text = "--stronglyTyped --onnx" if version == 10 else "--onnx"
    program = f'#!/bin/sh\nif [ "$1" = --help ]; then echo "{help_text}"; else echo "$@" >> said; fi\n'
    (tmp_path / "trtexec").write_text(program)
    (tmp_path / "trtexec").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for script in ("build.sh", "benchmark.sh"):
        subprocess.run(["sh", script], cwd=tmp_path, env=environment, check=True)
    built, timed = (tmp_path / "said").read_text().splitlines()
    assert built == wanted
    assert timed.startswith("--loadEngine=model.engine")


def run_script(folder, **choices):
    (folder / "build_engine.py").write_text(tensorrt_files(RANGES)["build_engine.py"])
    (folder / "tensorrt.py").write_text(
        TENSORRT.format(**{"version": "10.13", "engine": "b'engine'", "parsed": True} | choices)
    )
    return subprocess.run([sys.executable, "build_engine.py"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("version", "flags"), [("10.13.3", 2), ("11.0.0", 0)])
def test_build_engine_script_builds(tmp_path, version, flags):
    done = run_script(tmp_path, version=version)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.engine").read_bytes() == b"engine"
    assert (tmp_path / "said.json").read_text() == f'[{flags}, "model.onnx"]'


def test_build_engine_script_reports_parser_errors(tmp_path):
    done = run_script(tmp_path, parsed=False)
    assert (done.returncode, done.stderr.strip()) == (1, "this operator is unknown")
    done = run_script(tmp_path, engine=None)
    assert "TensorRT built no engine" in done.stderr
    assert not (tmp_path / "model.engine").exists()
