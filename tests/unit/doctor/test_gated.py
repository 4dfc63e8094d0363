"""Gated MLPs among linear layers: those that are published, and what only looks like one."""

import pytest

from octavo.doctor.gated import gated_linears

UP, DOWN, SQUARE = (24, 8), (8, 24), (8, 8)


@pytest.mark.parametrize(
    ("shapes", "pair", "down"),
    [
        ({"gate_proj": UP, "up_proj": UP, "down_proj": DOWN}, ("gate_proj", "up_proj"), "down_proj"),
        ({"w1": UP, "w2": DOWN, "w3": UP}, ("w1", "w3"), "w2"),
        ({"a": UP, "b": DOWN, "c": UP, "router": (2, 8)}, ("a", "c"), "b"),
        ({"wi_0": SQUARE, "wi_1": SQUARE, "wo": SQUARE}, ("wi_0", "wi_1"), "wo"),
        ({"gate": UP, "up": UP, "extra": UP, "down": DOWN}, ("gate", "up"), "down"),
        ({"gate_up_proj": (48, 8), "down_proj": DOWN}, ("gate_up_proj",), "down_proj"),
        ({"gate_up_proj": (16, 8), "down_proj": SQUARE}, ("gate_up_proj",), "down_proj"),
        ({"fc1": (48, 8), "fc2": DOWN}, ("fc1",), "fc2"),
    ],
)
def test_gated(shapes, pair, down):
    assert gated_linears(shapes) == (pair, (down,))


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"query": SQUARE, "key": SQUARE, "value": SQUARE},
        {"q_proj": SQUARE, "k_proj": SQUARE, "v_proj": SQUARE, "o_proj": SQUARE},
        {"q_proj": UP, "k_proj": UP, "v_proj": UP, "o_proj": DOWN},  # heads wider than the model
        {"q_proj": SQUARE, "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": SQUARE},
        {"qkv_proj": (48, 8), "o_proj": DOWN},  # grouped queries: as many of them as of keys and values
        {"qkv_proj": UP, "o_proj": SQUARE},
        {"up": (32, 8), "down": (8, 32)},
        {"a": UP, "b": UP},
        {"a": UP, "b": (6, 8), "c": DOWN},
        {"a": UP, "b": UP, "c": (8, 6)},
        {"a": UP, "b": UP, "c": UP, "d": DOWN},
        {"a": (47, 8), "b": (8, 23)},
    ],
)
def test_not_gated(shapes):
    assert gated_linears(shapes) == ((), ())


def test_a_layer_that_another_reads_whole_is_no_fused_gate():
    """A plain MLP of three layers that narrows by half has the shapes of a fused gate, up and down projection."""
    assert gated_linears({"fc1": (48, 8), "fc2": (24, 48), "fc3": (8, 24)}) == ((), ())
    assert gated_linears({"fc1": (48, 8), "fc3": (8, 24)}) == (("fc1",), ("fc3",))
