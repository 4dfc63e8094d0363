"""``octavo.serving``, the former name of ``octavo.inference``."""

import importlib

import pytest

from octavo import inference


def test_former_name_gives_the_same_objects_and_warns():
    former = importlib.import_module("octavo.serving")
    assert set(dir(former)) == set(inference.__all__)
    for name in inference.__all__:
        with pytest.warns(DeprecationWarning, match=r"octavo\.inference"):
            assert getattr(former, name) is getattr(inference, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = former.nothing
