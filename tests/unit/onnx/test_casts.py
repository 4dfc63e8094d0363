"""Which node is which cast: merged, not merged, missing; and what is noted of a cast."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import CheckpointError
from octavo.onnx.casts import RecordedCast, ReplayCodes, match_nodes, record_casts
from octavo.onnx.graph import graph_of_module
from octavo.onnx.operators import to_codes


def casts(word):
    """A cast for each letter; equal letters are equal casts."""
    return [RecordedCast(torch.full((2, 3), float(ord(letter))), torch.tensor(1.0)) for letter in word]


@pytest.mark.parametrize(
    ("own", "graph", "places"),
    [
        ("abc", "abc", [0, 1, 2]),
        ("aaab", "ab", [0, 0, 0, 1]),  # q, k and v
        ("aab", "aab", [0, 1, 2]),  # two that are equal by chance, and stay two
        ("aaab", "aab", [0, 1, 0, 2]),  # either of the two has the codes
        ("abab", "ab", [0, 1, 0, 1]),
        ("abac", "abc", [0, 1, 0, 2]),
        ("aba", "aba", [0, 1, 2]),
        ("", "", []),
    ],
)
def test_casts_are_matched_with_nodes(own, graph, places):
    assert match_nodes(casts(own), casts(graph)) == places


@pytest.mark.parametrize(("own", "graph", "different"), [("ab", "a", 2), ("a", "ab", 1), ("aa", "aaa", 1)])
def test_different_number_of_casts_is_an_error(own, graph, different):
    words = f"the graph has {len(graph)} casts to FP8, the model {different} distinct ones"
    with pytest.raises(CheckpointError, match=words):
        match_nodes(casts(own), casts(graph))


def test_casts_with_other_scale_or_shape_differ():
    one = RecordedCast(torch.ones(2, 3), torch.tensor(1.0))
    assert one.repeats(RecordedCast(torch.ones(2, 3), torch.tensor(1.0)))
    assert not one.repeats(RecordedCast(torch.ones(2, 3), torch.tensor(2.0)))
    assert not one.repeats(RecordedCast(torch.ones(3, 2), torch.tensor(1.0)))


def test_codes_are_replayed_in_order():
    x, encode = torch.ones(2), torch.tensor(2.0)
    with ReplayCodes([torch.tensor([4.0, 8.0]), torch.tensor([16.0, 32.0])]):
        first, second = (to_codes(each, encode) for each in (x, x))
    assert first.float().tolist() == [4.0, 8.0]
    assert second.float().tolist() == [16.0, 32.0]
    assert to_codes(x, encode).float().tolist() == [2.0, 2.0]


class CastsThenWrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = x + 1
        y = self.one(h)
        h.mul_(3)
        return y + self.two(h)


def test_recorded_cast_is_a_copy():
    model = CastsThenWrites()
    octavo.convert(model, "tensorwise")
    x = torch.randn(2, 8)
    graph = graph_of_module(model, (x,), torch.float32)
    with record_casts(graph.module) as noted, torch.no_grad():
        graph.module(x)
    (_, first), (_, second) = noted
    assert torch.equal(first.x, x + 1)
    assert torch.equal(second.x, 3 * (x + 1))
    assert not any(each._forward_hooks for each in graph.module.modules())
