"""Hopper's sums against two oracles, bit for bit: fractions, one product at a time, and mmaemu.

mmaemu (Apache-2.0) reports that its model of an H100's cuBLAS reproduces recorded hardware results. The fractions are
what the definition says, written down without a thought of speed. Codes are drawn from all 256, from the finite ones,
and from a handful each, which brings about the equal exponents, cancellations and zeros that random codes rarely have.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.formats import E4M3, E5M2, Format
from octavo.numerics import quantize
from octavo.numerics.accumulate import Accumulate, hopper_sums
from octavo.numerics.reference import decode

FORMATS = (E4M3, E5M2)
HOPPER = (Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW)
PAIRS = [(a, b) for a in FORMATS for b in FORMATS]

every_pair = pytest.mark.parametrize(("fmt_a", "fmt_b"), PAIRS, ids=lambda fmt: fmt.name)
every_way = pytest.mark.parametrize("how", HOPPER)


def exponent(value: Fraction) -> int:
    """floor(log2 |value|) of a nonzero value, by comparison."""
    guess = abs(value).numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= abs(value) else guess - 1


def cut(value: Fraction, largest: int) -> Fraction:
    """``value`` towards zero, to 13 bits below 2^largest."""
    quantum = Fraction(2) ** (largest - 13)
    return int(value / quantum) * quantum


def factor(code: int, fmt: Format) -> tuple[Fraction, int]:
    value = Fraction(decode(code, fmt))
    return value, max(exponent(value), exponent(Fraction(fmt.min_normal))) if value else 0


def chain_by_fractions(products: list[tuple[Fraction, int]]) -> Fraction:
    """``products``: values with their exponents."""
    total = Fraction(0)
    for first in range(0, len(products), 32):
        terms = [(value, e) for value, e in products[first : first + 32] if value]
        if total:
            terms.append((total, exponent(total)))
        largest = max((e for _, e in terms), default=0)
        total = sum((cut(value, largest) for value, _ in terms), Fraction(0))
        total = cut(total, exponent(total)) if total else total
    return total


def sum_by_fractions(a: list[int], b: list[int], fmt_a: Format, fmt_b: Format, how: Accumulate) -> np.float32:
    values = [(decode(x, fmt_a), decode(y, fmt_b)) for x, y in zip(a, b, strict=True)]
    if not all(np.isfinite(pair).all() for pair in values):
        with np.errstate(invalid="ignore"):
            return np.float32(sum(x * y for x, y in values))  # IEEE: a finite part cannot overflow a double
    factors = [(factor(x, fmt_a), factor(y, fmt_b)) for x, y in zip(a, b, strict=True)]
    products = [(x * y, e + f) for (x, e), (y, f) in factors]
    length = 128 if how is Accumulate.HOPPER_SLOW else max(len(products), 1)
    total = np.float32(0)
    for first in range(0, len(products), length):
        total += np.float32(float(chain_by_fractions(products[first : first + length])))
    return total


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The sign and payload of a NaN apart."""
    assert actual.dtype is expected.dtype is torch.float32
    assert torch.equal(actual.isnan(), expected.isnan())
    different = (actual.view(torch.int32) != expected.view(torch.int32)) & ~actual.isnan()
    assert not different.any(), f"{actual[different][:4].tolist()} is not {expected[different][:4].tolist()}"


def as_codes(numbers: np.ndarray, fmt: Format) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.uint8)).view(fmt.torch_dtype)


def assert_fractions(a: np.ndarray, b: np.ndarray, fmt_a: Format, fmt_b: Format, how: Accumulate) -> None:
    expected = [[sum_by_fractions(x.tolist(), y.tolist(), fmt_a, fmt_b, how) for y in b] for x in a]
    actual = hopper_sums(as_codes(a, fmt_a), as_codes(b, fmt_b), accumulate=how)
    assert_same_bits(actual, torch.from_numpy(np.array(expected, dtype=np.float32)))


def assert_mmaemu(a: torch.Tensor, b: torch.Tensor, how: Accumulate) -> None:
    mmaemu = pytest.importorskip("mmaemu", reason="mmaemu is not installed: its model of an H100 cannot be compared")
    fast = how is Accumulate.HOPPER_FAST
    expected = mmaemu.accumulate(a, b, use_fast_accum=fast, profile="hopper", splitk=1, backend="reference")
    assert_same_bits(hopper_sums(a, b, accumulate=how), expected)


@st.composite
def code_matrices(draw: st.DrawFn, rows: int, k: int, fmt: Format) -> np.ndarray:
    """[rows, K] of all 256 codes, of the finite ones, or of up to six."""
    finite = [code for code in range(256) if code & fmt.magnitude_mask <= fmt.max_code]
    handful = st.lists(st.integers(0, 255), min_size=1, max_size=6)
    finite_handful = st.lists(st.sampled_from(finite), min_size=1, max_size=6)
    pool = draw(st.one_of(st.just(list(range(256))), st.just(finite), handful, finite_handful))
    picks = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return picks.choice(pool, size=(rows, k))


@st.composite
def operands(draw: st.DrawFn, *, rows: int, max_k: int) -> tuple[np.ndarray, np.ndarray, Format, Format]:
    fmt_a, fmt_b = draw(st.sampled_from(PAIRS))
    k = draw(st.integers(0, max_k))
    return draw(code_matrices(rows, k, fmt_a)), draw(code_matrices(rows, k, fmt_b)), fmt_a, fmt_b


@pytest.mark.long
@every_way
@settings(max_examples=100)
@given(given_operands=operands(rows=2, max_k=300))
def test_fractions(how, given_operands):
    a, b, fmt_a, fmt_b = given_operands
    assert_fractions(a, b, fmt_a, fmt_b, how)


@pytest.mark.long
@every_way
@settings(max_examples=100)
@given(given_operands=operands(rows=5, max_k=700))
def test_mmaemu(how, given_operands):
    a, b, fmt_a, fmt_b = given_operands
    assert_mmaemu(as_codes(a, fmt_a), as_codes(b, fmt_b), how)


@every_pair
def test_every_product_of_two_codes(fmt_a, fmt_b):
    """Alone, each is exact; NaN and ±Inf are those of the product."""
    column = np.arange(256)[:, None]
    a, b = as_codes(column, fmt_a), as_codes(column, fmt_b)
    products = a.float() * b.float().t() + 0.0
    assert_same_bits(hopper_sums(a, b, accumulate=Accumulate.HOPPER_FAST), products)


@pytest.mark.long
@every_pair
@every_way
def test_every_product_beside_another(fmt_a, fmt_b, how):
    """Every pair of codes as the second product of a step: how it is aligned to the first, or the first to it."""
    beside = 0x29  # 0.28125 in E4M3, 0.0390625 in E5M2: in the middle of the exponents
    second = np.arange(0, 256, 3 if fmt_a is fmt_b else 5)
    pair = np.stack([np.full_like(second, beside), second], axis=1)
    assert_fractions(pair, pair, fmt_a, fmt_b, how)


@pytest.mark.parametrize("signs", ["zero-mean", "same sign"])
@pytest.mark.parametrize("k", [96, 1000, 4096])
@every_pair
@every_way
def test_mmaemu_on_quantized_data(signs, k, fmt_a, fmt_b, how):
    a, b = torch.randn(6, k), torch.randn(5, k)
    if signs == "same sign":
        a, b = a.abs(), b.abs()
    assert_mmaemu(quantize(a, fmt_a).data, quantize(b, fmt_b).data, how)


@every_way
def test_fractions_on_quantized_data(how):
    a, b = (quantize(torch.randn(2, 1000), fmt).data.view(torch.uint8).numpy() for fmt in FORMATS)
    assert_fractions(a, b, E4M3, E5M2, how)


@pytest.mark.parametrize(("k", "bias"), [(4096, -0.071), (16384, -0.22)])
def test_long_fast_accumulation_of_positive_numbers_has_the_known_bias(k, bias):
    a, b = (quantize(torch.randn(64, k).abs(), E4M3).data for _ in "ab")
    exact = (a.double() @ b.double().t()).sum()
    fast, slow = (hopper_sums(a, b, accumulate=how).double().sum() / exact - 1 for how in HOPPER)
    assert fast.item() == pytest.approx(bias, rel=0.03)  # it depends on where amax lies between powers of two
    assert abs(slow.item()) < 0.001
