import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import RotaryScaling, rotary_table, rotate
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


LLAMA_3_1 = {"factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_positions": 8192}


@pytest.mark.parametrize("changes", [{}, {"factor": 32.0}, {"original_positions": 40, "high_frequency_factor": 7.0}])
def test_scaled_frequencies_are_those_of_llama_3_1(changes):
    """Transformers' own formula; its table is float32 too."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers = LLAMA_3_1 | changes
    theirs = dict(zip(("factor", "low_freq_factor", "high_freq_factor"), numbers.values(), strict=False))
    rope = theirs | {"original_max_position_embeddings": numbers["original_positions"], "rope_theta": 5e5}
    config = LlamaConfig(head_dim=128, rope_parameters=rope | {"rope_type": "llama3"})
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    frequencies = 1.0 / 5e5 ** (torch.arange(0, 128, 2).float() / 128)
    found = RotaryScaling(**numbers).scaled(frequencies)
    torch.testing.assert_close(found, wanted, rtol=5e-7, atol=0)
    assert not torch.equal(found, frequencies)
    cos, _ = rotary_table(128, 64, 5e5, scaling=RotaryScaling(**numbers))
    torch.testing.assert_close(cos[63, :64], (63 * wanted).cos(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor": 0.0}, "must be positive"),
        ({"factor": float("nan")}, "must be positive"),
        ({"original_positions": "long"}, "must be positive"),
        ({"low_frequency_factor": 4.0}, "must be less than high_frequency_factor"),
    ],
)
def test_numbers_of_no_scaling_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        RotaryScaling(**LLAMA_3_1 | changes)


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
