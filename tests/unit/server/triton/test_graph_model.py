"""The model that runs a graph: batches of several requests, beside onnxruntime asked for each alone."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from octavo.server.triton.graph_model import TritonPythonModel  # noqa: E402 -- behind what it needs
from tests.unit.server.triton.conftest import Request  # noqa: E402


@pytest.fixture
def path(tmp_path):
    """Rows of a table by ids [B, T], in FP8 and back: onnxruntime has that only where nothing is fused."""
    from onnx import TensorProto, helper

    table = np.arange(12, dtype=np.float32).reshape(6, 2) / 3
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("QuantizeLinear", ["rows", "scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["decoded"]),
    ]
    graph = helper.make_graph(
        nodes,
        "rows",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("decoded", TensorProto.FLOAT, ["batch", "sequence", 2])],
        [
            helper.make_tensor("table", TensorProto.FLOAT, table.shape, table.ravel()),
            helper.make_tensor("scale", TensorProto.FLOAT, [], [0.5]),
            helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], [0.0]),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / "1").mkdir()
    onnx.save(made, tmp_path / "1" / "model.onnx")
    return tmp_path


@pytest.fixture
def model(utils, path):
    made = TritonPythonModel()
    made.initialize({"model_repository": str(path), "model_version": "1"})
    return made


def ids(*rows):
    return Request(ids=np.array(rows, dtype=np.int64))


def result(response):
    (tensor,) = response.output_tensors()
    assert tensor.name() == "decoded"
    return tensor.as_numpy()


def test_batch_matches_single_requests(model):
    requests = [ids([0, 1, 2]), ids([3, 4, 5], [5, 5, 5]), ids([2, 2, 2])]
    together = [result(response) for response in model.execute(requests)]
    alone = [result(*model.execute([request])) for request in requests]
    for one, other, rows in zip(together, alone, (1, 2, 1), strict=True):
        assert one.shape == (rows, 3, 2)
        np.testing.assert_array_equal(one, other)
    exact = np.arange(12).reshape(6, 2)[[0, 1, 2]] / 3
    assert np.abs(together[0][0] - exact).max() <= exact.max() / 16  # half a step of E4M3


def test_invalid_request_fails_alone_in_a_batch(model):
    good, bad, other = model.execute([ids([1]), ids([6]), ids([2])])
    assert "out of data bounds" in bad.error().message()
    assert result(good).shape == result(other).shape == (1, 1, 2)
