"""Modules that moved: their former names give the same objects, with a warning."""

import importlib

import pytest

from octavo._former_names import forward
from octavo.kernels import threads

MOVED = {
    "octavo.export.onnx": "octavo.onnx",
    "octavo.integrations": "octavo.compat",
    "octavo.serving": "octavo.inference",
    "octavo.state": "octavo.nn.scaling_state",
    "octavo.training.data": "octavo.text.tokens",
    "octavo.training.tokenizer": "octavo.text.tokenizer",
}


@pytest.mark.parametrize(("former", "target"), MOVED.items())
def test_former_name_gives_the_same_objects_and_warns(former, target):
    moved, now = importlib.import_module(former), importlib.import_module(target)
    assert set(dir(moved)) >= set(now.__all__)
    for name in now.__all__:
        with pytest.warns(DeprecationWarning, match=f"{former} is {target} now"):
            assert getattr(moved, name) is getattr(now, name)
    with pytest.raises(AttributeError, match=f"module '{former}' has no attribute 'nothing'"):
        _ = moved.nothing


@pytest.mark.parametrize(
    ("former", "name"),
    [
        ("integrations", "ScalingState"),
        ("state", "discard_step"),
        ("state", "rescale_gradient_history"),
        ("training.data", "prepare"),
        ("training.tokenizer", "train_tokenizer"),
    ],
)
def test_documented_names_are_among_them(former, name):
    assert name in dir(importlib.import_module(f"octavo.{former}"))


def test_modules_of_a_former_package_are_imported_when_they_are_read():
    get, names = forward("octavo.former", "octavo.kernels", submodules=("threads",))
    assert "threads" in names()
    with pytest.warns(DeprecationWarning, match=r"octavo\.kernels"):
        assert get("threads") is threads
