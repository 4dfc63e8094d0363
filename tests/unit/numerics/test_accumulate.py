"""Single steps of a tensor core's sum, worked out by hand, and how sums are cut into tiles and chains."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics import accumulate
from octavo.numerics.accumulate import CHAIN, Accumulate, hopper_chains, hopper_sums

FAST, SLOW = Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = float("inf"), float("nan")

both = pytest.mark.parametrize("how", [FAST, SLOW])


def dot(a: list[float], b: list[float], dtype: torch.dtype = E4M3, how: Accumulate = FAST) -> float:
    rows = (torch.tensor([values]).to(dtype) for values in (a, b))
    return hopper_sums(*rows, accumulate=how).item()


def codes(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def test_products_below_the_largest_are_cut_at_13_bits():
    quantum = 2.0 ** (8 - 13)  # of a step whose largest product is 256
    assert dot([256.0, 2 * quantum], [1.0, 1.0]) == 256 + 2 * quantum
    assert dot([256.0, 1.75 * quantum], [1.0, 1.0]) == 256 + quantum
    assert dot([256.0, -1.75 * quantum], [1.0, 1.0]) == 256 - quantum  # towards zero, not down
    assert dot([256.0, *[0.5 * quantum] * 31], [1.0] * 32) == 256  # half a quantum each, 31 times: nothing


def test_the_total_takes_part_in_the_alignment():
    later = [0.0] * 31
    assert dot([256.0, *later, 2.0**-6], [1.0] * 33) == 256  # cut for the total's sake
    # and the total is cut for the sake of a product: 1 + 2^-6 · 1.5 next to 448 · 16 keeps the 1
    assert dot([1.0, 1.5 * 2**-6, *later[:30], 448.0], [1.0] * 32 + [16.0]) == 448 * 16 + 1


def test_a_total_keeps_13_bits_of_its_own():
    """Every product is a multiple of its step's quantum; their sum may be too long."""
    assert dot([256.0] * 31 + [1.0], [1.0] * 32) == 7937  # in binary 13 digits: 1 and 12 fraction bits
    assert dot([448.0] * 31 + [1.0], [2.0] * 31 + [1.0]) == 27776  # 27,777 has 15


def test_zeros_do_not_count_and_subnormals_count_as_the_smallest_normal():
    assert dot([448.0, 2.0**-9], [0.0, 2.0**-9]) == 2.0**-18
    # Exponents -6 and 8 add up to 2 whatever the subnormal's value, so the quantum is 2^-11 and 1.5 of them are cut.
    assert dot([2.0**-9, 2.0**-6], [256.0, 1.5 * 2**-5]) == 0.5 + 2**-11
    assert dot([2.0**-6, 2.0**-6], [32.0, 1.5 * 2**-5]) == 0.5 + 1.5 * 2**-11


@both
@pytest.mark.parametrize("a", [[0.0], [-0.0], [-1.0, 1.0], [-0.0] * 300])
def test_a_zero_is_positive(how, a):
    assert repr(dot(a, [1.0] * len(a), how=how)) == "0.0"


@both
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([INF, 1.0], [1.0, -5.0], INF),
        ([INF, 1.0], [-1.0, -5.0], -INF),
        ([INF, 0.0], [0.0, 1.0], NAN),
        ([INF, INF], [1.0, -1.0], NAN),
        ([NAN, 1.0], [0.0, 1.0], NAN),
        ([INF, *[0.0] * 40, -INF], [1.0] * 42, NAN),  # in different steps
        ([1.0, *[0.0] * 40, -INF, *[57344.0] * 200], [57344.0] * 242, -INF),
    ],
)
def test_nan_and_inf_are_those_of_the_exact_sum(how, a, b, expected):
    assert repr(dot(a, b, E5M2, how)) == repr(expected)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 127, 128, 129, 300])
@both
def test_padding_with_zeros_changes_nothing(how, k):
    a, b = codes(3, k), codes(5, k, dtype=E5M2)
    padded = [torch.cat([x, torch.zeros(len(x), 77).to(x.dtype)], dim=1) for x in (a, b)]
    assert same(hopper_sums(*padded, accumulate=how), hopper_sums(a, b, accumulate=how))


def test_chains_are_fast_sums_of_slices_and_slow_adds_them():
    a, b = codes(3, 2 * CHAIN + 40), codes(5, 2 * CHAIN + 40)
    chains = list(hopper_chains(a, b))
    slices = zip(a.split(CHAIN, dim=1), b.split(CHAIN, dim=1), strict=True)
    assert all(same(chain, hopper_sums(x, y, accumulate=FAST)) for chain, (x, y) in zip(chains, slices, strict=True))
    assert same(hopper_sums(a, b, accumulate=SLOW), chains[0] + chains[1] + chains[2])


@both
def test_tiles_do_not_show(how, monkeypatch):
    a, b = codes(37, 200), codes(53, 200)
    whole = hopper_sums(a, b, accumulate=how)
    monkeypatch.setattr(accumulate, "_TILE", (8, 16))
    assert same(hopper_sums(a, b, accumulate=how), whole)


@both
def test_operands_commute_and_need_not_be_contiguous(how):
    a, b = codes(200, 6).t(), codes(9, 400)[:, ::2]
    sums = hopper_sums(a, b, accumulate=how)
    assert same(sums, hopper_sums(a.contiguous(), b.contiguous(), accumulate=how))
    assert same(hopper_sums(b, a, accumulate=how), sums.t().contiguous())


@both
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 40), (3, 0, 40), (3, 2, 0), (0, 0, 0)])
def test_empty_operands(how, m, n, k):
    assert torch.equal(hopper_sums(codes(m, k), codes(n, k), accumulate=how), torch.zeros(m, n))


@pytest.mark.gpu
@both
def test_a_gpu_gives_the_same_bits(how):
    a, b = codes(70, 333), codes(90, 333, dtype=E5M2)
    assert same(hopper_sums(a.cuda(), b.cuda(), accumulate=how).cpu(), hopper_sums(a, b, accumulate=how))


def test_refusals():
    a = codes(2, 8)
    for wrong in (a.float(), a.float().to(torch.float8_e4m3fnuz)):
        with pytest.raises(ConfigError, match=f"b is {wrong.dtype}; quantize it"):
            hopper_sums(a, wrong, accumulate=FAST)
    for other in (codes(2, 9), codes(8)):
        with pytest.raises(ConfigError, match=r"a must be \[M, K\] and b \[N, K\]"):
            hopper_chains(a, other)
    for given in ("fp32", "hopper"):
        with pytest.raises(ConfigError, match=f"'hopper-fast' or 'hopper-slow', not {given}"):
            hopper_sums(a, a, accumulate=given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not fp32"):
        hopper_sums(a, a, accumulate=Accumulate.FP32)
