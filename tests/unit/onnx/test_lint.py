"""Each rule finds the graph that breaks it, and a good graph has no fault."""

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")

from octavo.onnx.lint import graph_bytes, lint  # noqa: E402 (after the check that onnx is there)

helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
E4M3, E5M2 = onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E5M2


def tensor(name, kind, shape, value=1.0):
    return helper.make_tensor(name, kind, shape, np.full(int(np.prod(shape)), value).tolist())


def fp8_graph(*, scale=0.5, fp8=E4M3, zero=0.0, scale_kind=FLOAT, computed=False, between=(), weight_kind=None):
    """x → Q → DQ → MatMul ← DQ ← weight, with one thing wrong."""
    weight_kind = fp8 if weight_kind is None else weight_kind
    constants = [
        tensor("scale", scale_kind, [], scale),
        tensor("unit", FLOAT, [], 1.0),
        tensor("zero", fp8, [], zero),
        tensor("weight", weight_kind, [4, 2], 1.0),
    ]
    nodes = [
        helper.make_node("Abs", ["unit"], ["positive"], name="positive"),
        helper.make_node("QuantizeLinear", ["x", "positive" if computed else "unit", "zero"], ["codes"], name="q"),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["decoded"], name="dq_x"),
    ]
    if weight_kind == fp8:
        nodes.append(helper.make_node("DequantizeLinear", ["weight", "scale"], ["w"], name="dq_w"))
    else:
        nodes.append(helper.make_node("Identity", ["weight"], ["w"], name="w"))
    nodes += [*between, helper.make_node("MatMul", ["decoded", "w"], ["y"], name="product")]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [3, 4])],
        [helper.make_tensor_value_info("y", scale_kind, [3, 2])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def rules(model):
    return [fault.rule for fault in lint(model)]


@pytest.mark.parametrize("kind", [FLOAT, HALF])
def test_valid_graph_has_no_fault(kind):
    assert rules(fp8_graph(scale_kind=kind)) == []


def test_e5m2_is_a_fault():
    found = lint(fp8_graph(fp8=E5M2))
    assert {fault.rule for fault in found} == {"format"}
    assert "E5M2; TensorRT reads E4M3" in str(found[0])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_scale_is_a_fault(scale):
    found = lint(fp8_graph(scale=scale))
    assert [(fault.rule, fault.node) for fault in found] == [("scale", "dq_x"), ("scale", "dq_w")]
    assert str(scale) in found[0].message


def test_computed_scale_is_a_fault():
    assert [str(fault) for fault in lint(fp8_graph(computed=True))] == [
        "scale: q: is computed in the graph; TensorRT takes constants"
    ]


def test_nonzero_zero_point_is_a_fault():
    assert rules(fp8_graph(zero=1.0)) == ["zero point"]


def test_cast_to_fp8_is_a_fault():
    cast = helper.make_node("Cast", ["x"], ["more"], to=E4M3, name="cast")
    assert [(f.rule, f.node) for f in lint(fp8_graph(between=[cast]))] == [("cast", "cast")]


def test_scale_of_another_dtype_is_a_fault():
    model = fp8_graph()
    wide = helper.make_node("QuantizeLinear", ["h", "unit", "zero"], ["more"], name="mixed")
    model.graph.node.insert(0, wide)
    model.graph.input.append(helper.make_tensor_value_info("h", HALF, [3]))
    assert [str(fault) for fault in lint(model)] == ["dtype: mixed: has a scale in FLOAT and a tensor in FLOAT16"]


def test_folded_weights_are_a_fault():
    found = lint(fp8_graph(weight_kind=FLOAT))
    assert [str(fault) for fault in found] == ["fp8 share: the graph: no product has a weight in FP8"]


def test_missing_weight_of_a_layer_is_a_fault():
    own, other = (torch.full((4, 2), value).to(torch.float8_e4m3fn) for value in (1.0, 2.0))
    assert lint(fp8_graph(), weights={"0": own}) == ()
    found = lint(fp8_graph(), weights={"0": own, "2": other, "4": own.reshape(2, 4)})
    assert [str(fault) for fault in found] == [
        "fp8 share: the graph: no product reads the codes of layer '2'",
        "fp8 share: the graph: no product reads the codes of layer '4'",
    ]
    unread = fp8_graph()
    unread.graph.initializer.append(tensor("unread", E4M3, [4, 2], 2.0))
    assert len(lint(unread, weights={"2": other})) == 1


def test_codes_read_without_decoding_are_a_fault():
    read = helper.make_node("Transpose", ["weight"], ["turned"], name="turn")
    assert [(f.rule, f.node) for f in lint(fp8_graph(between=[read]))] == [("weight", "turn")]


def test_graph_bytes_counts_constants():
    found = graph_bytes(fp8_graph())
    assert (found.codes, found.total) == (1 + 8, 4 + 4 + 1 + 8)
    assert found.fp8_share == 9 / 17
