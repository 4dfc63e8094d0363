"""TensorValues in lists are read in order and once, however the lists stand in each other."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.fields import FieldError
from octavo.server.tensors import MOST_DIMENSIONS, MOST_VALUES, TensorValues

NESTED = st.recursive(st.lists(st.integers()), lambda inner: st.lists(st.integers() | inner), max_leaves=20)


def flat(value):
    return [one for inner in value for one in flat(inner)] if isinstance(value, list) else [value]


def depth(value):
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(NESTED)
def test_values_are_those_of_all_lists_in_order(data):
    if depth(data) <= MOST_DIMENSIONS:
        assert TensorValues().read(data, "data") == flat(data)
    else:
        with pytest.raises(FieldError, match="data may have at most 8 levels of lists"):
            TensorValues().read(data, "data")


def test_as_many_values_as_may_be_are_read():
    assert len(TensorValues().read([[0] * (MOST_VALUES - 1), 0], "data")) == MOST_VALUES


def test_nothing_behind_the_first_value_too_many_is_looked_at():
    class Counted(list):
        looked_at = 0

        def __iter__(self):
            for value in super().__iter__():
                Counted.looked_at += 1
                yield value

    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    with pytest.raises(FieldError, match="data may have at most 65536 values"):
        TensorValues().read(Counted([0] * 500_000 + [deep]), "data")
    assert Counted.looked_at == MOST_VALUES + 1
