"""The exception tree is the one its module draws."""

import re

import pytest

from octavo import errors

PARENTS = {
    "OctavoError": (Exception,),
    "ConfigError": (errors.OctavoError, ValueError),
    "ContextLengthError": (errors.ConfigError,),
    "DataError": (errors.OctavoError, ValueError),
    "CheckpointError": (errors.OctavoError,),
    "BackendError": (errors.OctavoError,),
    "QueueFullError": (errors.OctavoError,),
    "ClosedError": (errors.OctavoError,),
    "TritonError": (errors.OctavoError,),
    "TrainingError": (errors.OctavoError,),
    "NonFiniteLossError": (errors.TrainingError,),
}


def test_all_names_every_exception():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(errors.__all__) == PARENTS.keys() == defined


@pytest.mark.parametrize("name", PARENTS)
def test_parents(name):
    assert getattr(errors, name).__bases__ == PARENTS[name]


def test_the_drawing_names_every_exception():
    drawn = re.findall(r"^\W*(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(PARENTS)


@pytest.mark.parametrize("name", PARENTS)
def test_text_is_kept_as_given(name):
    more = {"retry_after_s": 1.0} if name == "QueueFullError" else {}
    assert str(getattr(errors, name)("margin must be 0 or more binades, not -1", **more)).endswith("not -1")
