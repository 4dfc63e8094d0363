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


@pytest.mark.long
@given(NESTED)
def test_nested_lists_are_flattened_in_order(data):
    if depth(data) <= MOST_DIMENSIONS:
        assert TensorValues().read(data, "data") == flat(data)
    else:
        with pytest.raises(FieldError, match="data may have at most 8 levels of lists"):
            TensorValues().read(data, "data")


def test_largest_allowed_number_of_values_is_read():
    assert len(TensorValues().read([[0] * (MOST_VALUES - 1), 0], "data")) == MOST_VALUES


def test_reading_stops_at_the_first_excess_value():
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
