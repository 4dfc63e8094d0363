"""The sentence about ranks that differ; ranks themselves compare in tests/contract/test_training_ranks.py."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.parallel.agreement import _sums_of_bits, require_equal
from octavo.parallel.ranks import ALONE, Ranks


class Others(Ranks):
    """Ranks of which the others' values are given."""

    __slots__ = ("values",)
    values: tuple[dict[str, object], ...]

    def gathered(self, value):
        return [value, *self.values]


def others(*values):
    ranks = Others(rank=0, size=1 + len(values))
    object.__setattr__(ranks, "values", values)
    return ranks


def test_equal_values_pass():
    require_equal(others({"a": 1}, {"a": 1}), {"a": 1}, advice="x")
    require_equal(ALONE, {"a": float("inf")}, advice="x")


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        (({"a": 1}, {"a": 2}), "the ranks differ: a is 1 on ranks 0, 1 and 2 on rank 2; x"),
        (({"a": 3}, {"a": 2}), "the ranks differ: a is 1 on rank 0 and 3 on rank 1 and 2 on rank 2; x"),
        (({"a": 1, "b": "z"}, {"a": 1}), "the ranks differ: b is None on ranks 0, 2 and 'z' on rank 1; x"),
    ],
)
def test_the_first_difference_is_named(theirs, sentence):
    with pytest.raises(ConfigError) as error:
        require_equal(others(*theirs), {"a": 1}, advice="x")
    assert str(error.value) == sentence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_digest_of_one_changed_element(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    changed = tensor.clone()
    changed.view(-1)[-1] = 0
    sums = _sums_of_bits(
        {
            "one": tensor,
            "same": tensor.clone(),
            "other": changed,
            "transposed": tensor.t() if tensor.ndim > 1 else tensor,
        }
    )
    assert sums["one"] == sums["same"] == sums["transposed"]
    assert sums["one"] != sums["other"]


def test_digest_of_an_element_whose_bytes_have_the_same_sum():
    """1.0 is the bytes 80 3F in bfloat16, 0.251953125 the bytes 81 3E."""
    sums = _sums_of_bits(
        {name: torch.tensor([each], dtype=torch.bfloat16) for name, each in (("a", 1.0), ("b", 0.251953125))}
    )
    assert sums["a"] != sums["b"]
