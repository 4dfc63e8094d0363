"""The sentence about ranks that differ; ranks themselves compare in tests/contract/test_training_ranks.py."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo.errors import ConfigError
from octavo.parallel import agreement
from octavo.parallel.agreement import _digests, _numbers, require_equal, require_equal_state
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


class Meeting:
    """Exchange between two threads, each a rank; the longest message that one has sent."""

    def __init__(self):
        self.values, self.barrier, self.longest = [None, None], threading.Barrier(2), 0

    def exchange(self, rank, value):
        self.longest = max(self.longest, len(pickle.dumps(value)))
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Thread(Ranks):
    __slots__ = ("meeting",)
    meeting: Meeting

    def gathered(self, value):
        return self.meeting.exchange(self.rank, value)

    def gathered_numbers(self, numbers):
        return torch.tensor(self.gathered(list(numbers)), dtype=torch.float64).tolist()


def compared(tensors, shards):
    """What two ranks say of these tensors and groups of shards, nothing if they are equal; and the longest message."""
    meeting = Meeting()

    def compare(rank):
        ranks = Thread(rank=rank, size=2)
        object.__setattr__(ranks, "meeting", meeting)
        try:
            require_equal_state(ranks, tensors[rank], {"a": 1}, advice="x", shards=shards[rank])
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = set(pool.map(compare, (0, 1)))
    assert len(said) == 1
    return said.pop(), meeting.longest


def refusals(one, other):
    """What two ranks that hold these tensors say, and the longest message."""
    return compared([{"same": torch.ones(3), "t": each} for each in (one, other)], [(), ()])


def slices(rank, norm):
    """Groups of a rank that shares its layers with another one: its slices, and the norm's shard that both hold."""
    return [{f"w, shard {rank}": torch.full((2,), float(rank))}, {"norm, shard 0": norm}]


def test_shards_that_both_hold_are_compared_beside_others_that_one_holds():
    norm = torch.ones(4)
    assert compared([{}, {}], [slices(rank, norm) for rank in (0, 1)])[0] == ""
    said, _ = compared([{}, {}], [slices(rank, norm + rank) for rank in (0, 1)])
    assert said == "the ranks differ: norm, shard 0, element 0 is 1.0 on rank 0 and 2.0 on rank 1; x"


@pytest.mark.parametrize("first", [0, 1, 4999, 123_456, 699_999])
def test_the_first_element_that_differs_is_named_by_small_messages(first):
    """A million elements; several later ones differ too."""
    tensor = torch.randn(1000, 1000)
    other = tensor.clone()
    other.view(-1)[first] += 1
    other.view(-1)[max(first, 700_000) :: 50_000] += 1
    values = [each.view(-1)[first].item() for each in (tensor, other)]
    said, longest = refusals(tensor, other)
    assert said == f"the ranks differ: t, element {first} is {values[0]} on rank 0 and {values[1]} on rank 1; x"
    assert longest < 1000


def test_bits_of_numbers_that_print_alike_are_named():
    one, other = (torch.tensor([0, 0x7FC00000 + last], dtype=torch.int32).view(torch.float32) for last in (0, 1))
    assert one[1].isnan()
    said, _ = refusals(one, other)
    assert said == "the ranks differ: t, bits of element 1 is 2143289344 on rank 0 and 2143289345 on rank 1; x"


def test_other_shapes_are_named():
    said, _ = refusals(torch.ones(2, 3), torch.ones(3, 3))
    assert said == "the ranks differ: the shape of t is (2, 3) on rank 0 and (3, 3) on rank 1; x"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_digest_of_one_changed_element(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    changed = tensor.clone()
    changed.view(-1)[-1] = 0
    sums = _digests(
        {
            "one": tensor,
            "same": tensor.clone(),
            "other": changed,
            "strided": tensor.t().contiguous().t() if tensor.ndim > 1 else tensor,
        }
    )
    assert sums["one"] == sums["same"] == sums["strided"]
    assert sums["one"] != sums["other"]


def reordered(tensor):
    """Tensors of the same elements in another order, and of bits with the same sum."""
    integers = tensor.clone().view(-1).view(torch.int32)
    ulps = integers.clone()
    ulps[[3, 9, 14]] += torch.tensor([1, -2, 1], dtype=torch.int32)
    yield "ulps", ulps
    yield "flipped", integers.flip(0)
    yield "rolled", integers.roll(1)
    swapped = integers.clone()
    swapped[[0, -1]] = integers[[-1, 0]]
    yield "swapped", swapped
    yield "rows", integers.view(tensor.shape).flip(0)
    yield "columns", integers.view(tensor.shape).roll(1, 1)
    yield "transposed", integers.view(tensor.shape).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_digest_of_flipped_signs(dtype, count):
    tensor = torch.ones(6, dtype=dtype)
    flipped = tensor.clone()
    flipped[:count] *= -1
    assert len(set(_digests({"one": tensor, "other": flipped}).values())) == 2


@pytest.mark.parametrize("shape", [(4, 5), (64, 64), (3, 4096), (70, 4096), (4097, 3), (90, 100)])
def test_digest_of_another_order(shape):
    tensor = torch.randn(shape)
    sums = _digests({"": tensor.view(torch.int32)} | dict(reordered(tensor)))
    assert len(set(sums.values())) == 8, sums


def test_an_order_that_differs_is_named_by_the_first_element_that_does():
    tensor = torch.randn(90, 100)
    other = tensor.clone()
    other[40:42] = tensor[40:42].flip(0)
    said, _ = refusals(tensor, other)
    assert said.startswith(f"the ranks differ: t, element 4000 is {tensor[40, 0].item()} on rank 0 and ")


def test_digest_of_several_chunks(monkeypatch):
    """Against a sum of Python's integers; the last chunk is not full."""
    monkeypatch.setattr(agreement, "CHUNK", 5)
    tensor = torch.randint(-(2**31), 2**31, (13,)).int()
    places, chunks = (_numbers(first, count, tensor.device).tolist() for first, count in ((0, 5), (5, 3)))
    expected = sum(places[at % 5] * chunks[at // 5] * value for at, value in enumerate(tensor.tolist()))
    assert (_digests({"": tensor})[""] - expected) % 2**64 == 0
    assert len({each % 2**64 for each in places + chunks}) == 8


def test_digest_of_swapped_rows_of_ones():
    sums = _digests({str(rows): torch.eye(64)[[*range(2, 64), *rows]] for rows in ((0, 1), (1, 0))})
    assert len(set(sums.values())) == 2


def test_digest_of_an_element_whose_bytes_have_the_same_sum():
    """1.0 is the bytes 80 3F in bfloat16, 0.251953125 the bytes 81 3E."""
    sums = _digests(
        {name: torch.tensor([each], dtype=torch.bfloat16) for name, each in (("a", 1.0), ("b", 0.251953125))}
    )
    assert sums["a"] != sums["b"]
