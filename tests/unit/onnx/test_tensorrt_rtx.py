"""What TensorRT-RTX is asked and says; with its bindings, beside what the lint says of the same graphs."""

import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import CheckpointError
from octavo.onnx import OnnxOptions, export_onnx
from octavo.onnx import export as exporting
from octavo.onnx import tensorrt_rtx as module_under_test
from octavo.onnx.graph import graph_of_module, write_graph
from octavo.onnx.lint import lint
from octavo.onnx.tensorrt import ShapeRange, shape_ranges
from octavo.onnx.tensorrt_rtx import BuildCheck, check_build, why_skipped
from tests.unit.onnx.test_export import K, mlp
from tests.unit.onnx.test_lint import E4M3, E5M2, FLOAT, fp8_graph, helper, onnx

installed = pytest.mark.skipif(bool(why_skipped()), reason=why_skipped())

RANGES = (ShapeRange(name="x", min=(3, 4), opt=(3, 4), max=(3, 4)),)
STEPS = """
  tensor={ alignment=128 const_payload_size=8192 dims={ 64 128 } name="qk" offset=2 strides={ 128 1 } type=fp8_e4m3 }
  tensor={ alignment=128 const_payload_size=4096 dims={ 64 64 } name="o" offset=3 strides={ 64 1 } type=fp8_e4m3 }
  tensor={ alignment=128 const_payload_size=256 dims={ 1 64 } name="norm" offset=4 strides={ 64 1 } type=float }
  tensor={ alignment=128 dims={ "rows" 64 } mem_prop=0 name="y" offset=0 strides={ 64 1 } type=half }
  sub_tensor={ base="x" dims={ "rows" 64 } mem_prop=0 name="x^deref" offset=0 strides={ 64 1 } type=fp8_e4m3 }
  fully_connected={ name="node_1+node_0" output={"a" } input={"x^deref" "qk" "alpha" "beta" } stream=0 }
  fully_connected={ name="node_2" output={"b" } input={"y" "norm" "alpha" "beta" } stream=0 }
  runtime_fusion={ name=__myl_CastMulCastFc input_args={ "y" "norm" "o" } output_args={ "c" } }
"""


def with_packages(monkeypatch, **versions):
    """Installed packages of TensorRT-RTX, ``bindings`` and ``libs``, by version; others are not installed."""

    def version(name):
        try:
            return versions[name.rpartition("-")[2]]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(module_under_test, "version", version)


def with_program(monkeypatch, folder, script):
    """Runs in place of Python."""
    with_packages(monkeypatch, bindings="1.7.1.116", libs="1.7.1.116")
    (folder / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


@pytest.mark.parametrize(("versions", "missing"), [({}, "bindings"), ({"bindings": "1.7.1.116"}, "libs")])
def test_skipped_without_the_bindings_or_their_libraries(tmp_path, monkeypatch, versions, missing):
    with_packages(monkeypatch, **versions)
    found = check_build(tmp_path / "model.onnx", RANGES)
    assert str(found) == (
        f"TensorRT-RTX: not run: tensorrt-rtx-cu13-{missing} is not installed; pip install 'octavo[tensorrt-rtx]'"
    )
    assert not found.problem


@pytest.mark.parametrize("version", ["1.8.0.7", "1.7.10.1"])
@pytest.mark.parametrize("other", ["bindings", "libs"])
def test_other_versions_are_skipped(tmp_path, monkeypatch, version, other):
    with_packages(monkeypatch, **{"bindings": "1.7.1.116", "libs": "1.7.1.116", other: version})
    wanted = (
        f"this check reads engines of version 1.7.1, and tensorrt-rtx-cu13-{other} is version {version}; "
        "pip install 'octavo[tensorrt-rtx]'"
    )
    assert why_skipped() == check_build(tmp_path / "model.onnx", RANGES).skipped == wanted


def test_child_process_receives_path_and_ranges(tmp_path, monkeypatch):
    with_program(monkeypatch, tmp_path, f"""echo "$@" > {tmp_path}/asked; cat >> {tmp_path}/asked
        echo '{{"engine_bytes": 3000000, "fp8_products": 14, "fp8_bytes": 98304}}'""")  # fmt: skip
    found = check_build(tmp_path / "model.onnx", RANGES)
    command, ranges = (tmp_path / "asked").read_text().splitlines()
    assert command == f"-I {module_under_test.__file__} {tmp_path}/model.onnx"
    assert ranges == '[{"name": "x", "min": [3, 4], "opt": [3, 4], "max": [3, 4]}]'
    assert str(found) == (
        "TensorRT-RTX 1.7.1: parsed and built on a CPU, not run; an engine of 3.0 MB with 14 products in FP8 and "
        "0.1 MB of weights in FP8"
    )


def test_a_crash_is_a_failed_check(tmp_path, monkeypatch):
    with_program(monkeypatch, tmp_path, "kill -SEGV $$")
    problem = check_build(tmp_path / "model.onnx", RANGES).problem
    assert problem == "its process ended by SIGSEGV: no message"


def test_bindings_that_do_not_load_are_a_failed_check(tmp_path, monkeypatch):
    """A traceback's last line says why."""
    with_program(monkeypatch, tmp_path, "echo Traceback >&2; echo 'ImportError: libtensorrt_rtx.so.1' >&2; exit 1")
    problem = check_build(tmp_path / "model.onnx", RANGES).problem
    assert problem == "its process ended by exit code 1: ImportError: libtensorrt_rtx.so.1"


@pytest.mark.long
def test_a_refused_graph_leaves_no_folder(tmp_path, monkeypatch):
    refused = BuildCheck(engine="TensorRT-RTX 1.7.1", problem="node 'q': it says so")
    monkeypatch.setattr(exporting, "check_build", lambda path, ranges: refused)
    model = nn.Sequential(nn.Linear(8, 4))
    octavo.convert(model, "tensorwise")
    with pytest.raises(CheckpointError, match=r"TensorRT-RTX 1\.7\.1 rejects the graph: node 'q': it says so"):
        export_onnx(model, tmp_path / "a", inputs=(torch.randn(2, 8),), options=OnnxOptions(tensorrt=True))
    assert not list(tmp_path.iterdir())


def test_fp8_products_and_bytes_are_counted_from_the_listing():
    """Two products of x, FP8, by a weight in FP8; one weight in FP8 that a product in high precision decodes."""
    assert module_under_test._fp8_in(STEPS.encode()) == {"fp8_products": 2, "fp8_bytes": 8192 + 4096}


def with_a_cast():
    """Its result is used: what is not, TensorRT does not look at."""
    between = [
        helper.make_node("Cast", ["x"], ["more"], to=E4M3, name="cast"),
        helper.make_node("Cast", ["more"], ["back"], to=FLOAT, name="back"),
    ]
    model = fp8_graph(between=between)
    model.graph.output.append(helper.make_tensor_value_info("back", FLOAT, [3, 4]))
    return model


POSITIVE = "Scale coefficients must all be positive"
GRAPHS = {  # the lint's rule, TensorRT's words; both empty where they accept
    "good": (fp8_graph(), "", ""),
    "a cast to FP8": (with_a_cast(), "cast", "has datatype FP8 but is not produced by"),
    "E5M2": (fp8_graph(fp8=E5M2), "format", "Failed to import initializer"),
    "scale 0": (fp8_graph(scale=0.0), "scale", POSITIVE),
    "scale below 0": (fp8_graph(scale=-1.0), "scale", POSITIVE),
    "scale NaN": (fp8_graph(scale=float("nan")), "scale", POSITIVE),
    # The lint is stricter: TensorRT-RTX builds these.
    "scale infinite": (fp8_graph(scale=float("inf")), "scale", ""),
    "scale computed": (fp8_graph(computed=True), "scale", ""),
    "a zero point": (fp8_graph(zero=1.0), "zero point", ""),
}


@installed
@pytest.mark.parametrize("name", GRAPHS)
def test_lint_rejects_graphs_that_tensorrt_rejects(name, tmp_path):
    model, rule, words = GRAPHS[name]
    assert {fault.rule for fault in lint(model)} == ({rule} if rule else set())
    onnx.save(model, tmp_path / "model.onnx")
    found = check_build(tmp_path / "model.onnx", RANGES)
    assert words in found.problem
    assert bool(found.problem) == bool(words)
    if not words:
        assert (found.fp8_products, found.fp8_bytes) == (1, 4 * 2)


@installed
def test_invalid_shapes_are_a_failed_check(tmp_path):
    onnx.save(fp8_graph(), tmp_path / "model.onnx")
    other = ShapeRange(name="x", min=(3, 5), opt=(3, 5), max=(3, 5))
    assert check_build(tmp_path / "model.onnx", (other,)).problem


@installed
def test_missing_file_is_a_failed_check(tmp_path):
    assert "Input file cannot be found" in check_build(tmp_path / "model.onnx", RANGES).problem


@installed
def test_every_recipe_is_built(tmp_path):
    """Three layers multiply codes, the fourth has a weight in FP8 alone."""
    model = mlp()
    graph = graph_of_module(model, (torch.randn(2, 5, K),), torch.float32)
    write_graph(graph, tmp_path / "model.onnx", opset=21, external_data=True)
    found = check_build(tmp_path / "model.onnx", shape_ranges(graph, context=None))
    assert found.problem == ""
    assert found.fp8_products == 3
    assert found.fp8_bytes >= sum(model.get_parameter(f"{layer}.weight").numel() for layer in (0, 2, 4, 6))
