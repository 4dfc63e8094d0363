import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import rotary_table, rotate
from tests.contract.transformer_oracle import turn


@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_pairs_turn_as_complex_numbers_do(theta):
    x = torch.randn(2, 11, 3, 6)
    cos, sin = rotary_table(6, 16, theta)
    torch.testing.assert_close(rotate(x, cos[:11], sin[:11]).double(), turn(x.double(), theta), rtol=1e-5, atol=1e-5)


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    cos, sin = rotary_table(8, 64)

    def score(query_at, key_at):
        turned = [rotate(x, cos[at : at + 1], sin[at : at + 1]) for x, at in ((q, query_at), (k, key_at))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(5, 2), score(43, 40), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(score(5, 2), score(5, 3), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_heads_are_rotated_in_fp32_and_rounded_once(dtype):
    x = torch.randn(2, 9, 3, 8).to(dtype)
    cos, sin = rotary_table(8, 9)
    exact = turn(x.double(), 10000.0)
    y = rotate(x, cos, sin)
    assert y.dtype is dtype
    assert ((y.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * (1 + 2**-6) + 1e-6).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5, 8), "head_dim must be even"),
        ((4, 0), "max_positions must be a whole number of at least 1, not 0"),
        ((4, 8, -1.0), "theta must be a positive number, not -1.0"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ConfigError, match=words):
        rotary_table(*arguments)


@pytest.mark.parametrize(
    ("x", "cos", "sin"),
    [
        ((1, 3, 2, 4), (3, 4), (2, 4)),
        ((1, 3, 2, 4), (5, 4), (5, 4)),
        ((1, 3, 2, 5), (3, 5), (3, 5)),
        ((3, 4), (3, 4), (3, 4)),
    ],
)
def test_tables_that_do_not_fit_are_refused(x, cos, sin):
    with pytest.raises(ConfigError, match=r"turn by two tables \[T, D\] with an even D, not"):
        rotate(torch.zeros(x), torch.zeros(cos), torch.zeros(sin))
