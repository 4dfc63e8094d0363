"""``octavo.export.onnx``, the former name of ``octavo.onnx``."""

import importlib

import pytest

from octavo import onnx


def test_former_name_gives_the_same_objects_and_warns():
    former = importlib.import_module("octavo.export.onnx")
    assert set(dir(former)) == set(onnx.__all__)
    for name in onnx.__all__:
        with pytest.warns(DeprecationWarning, match=r"octavo\.onnx"):
            assert getattr(former, name) is getattr(onnx, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = former.nothing
