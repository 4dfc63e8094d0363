"""The scale that a graph computes in onnxruntime, beside its formula in plain numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from octavo.onnx.graph import Graph, write_graph
from octavo.onnx.operators import encode_scale

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

MAX, TINY, LARGEST = np.float32(448), np.finfo(np.float32).tiny, np.finfo(np.float32).max
ROWS = np.array(
    [
        [0.0, -0.0, 0.0],
        [1e-3, -7.0, 3.0],
        [448.0, 1.0, 0.0],
        [1e-5, -2e-5, 0.0],
        [1e-38, 0.0, 0.0],
        [3e38, 1.0, 2.0],
        [1e-45, 0.0, 0.0],
        [6.6e-37, 3e-37, 0.0],
    ],
    dtype=np.float32,
)


class Encode(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return encode_scale(x, **self.options)


def in_onnxruntime(tmp_path, x, **options):
    given = torch.from_numpy(x)
    graph = Graph(
        name="Encode",
        module=Encode(**options).eval(),
        inputs=(given,),
        given=(given.dtype,),
        names=("x",),
        shapes=({},),
        outputs=("scale",),
        notes=(),
        linears={},
        dtype=given.dtype,
    )
    write_graph(graph, tmp_path / "model.onnx", opset=21, external_data=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def by_hand(amax, *, power_of_two, amax_floor, margin):
    """448 · 2^-margin over the largest magnitude, which counts as no less than the floor; 1 where all is zero."""
    with np.errstate(over="ignore", divide="ignore"):
        quotient = MAX * np.float32(2.0**-margin) / np.maximum(amax, np.float32(amax_floor))
    scale = np.clip(quotient.astype(np.float32), TINY, LARGEST)
    if power_of_two:
        scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1).astype(np.float32)
    return np.where(amax == 0, np.float32(1), scale)


@pytest.mark.long
@pytest.mark.parametrize(
    ("per_row", "power_of_two", "amax_floor", "margin"),
    [
        (True, False, 0.0, 0),
        (True, False, 1e-4, 0),
        (True, False, 0.0, 3),
        (True, False, 0.0, 12),
        (True, True, 1e-4, 2),
        (True, True, 0.0, 0),
        (False, False, 1e-4, 2),
    ],
)
def test_onnxruntime_computes_the_formula(tmp_path, *, per_row, power_of_two, amax_floor, margin):
    options = {"power_of_two": power_of_two, "amax_floor": amax_floor, "margin": margin}
    found = in_onnxruntime(tmp_path, ROWS, per_row=per_row, **options)
    amax = np.abs(ROWS).max(axis=1, keepdims=True) if per_row else np.abs(ROWS).max(keepdims=True)
    np.testing.assert_array_equal(found, by_hand(amax, **options))


@pytest.mark.long
def test_a_tensor_of_zeros_has_the_scale_one(tmp_path):
    zeros = np.zeros((2, 3), dtype=np.float32)
    for floor in (0.0, 1e-4):
        found = in_onnxruntime(tmp_path, zeros, per_row=False, power_of_two=False, amax_floor=floor, margin=1)
        assert found.tolist() == [[1.0]]
