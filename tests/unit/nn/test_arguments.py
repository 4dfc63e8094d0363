import pytest

from octavo.errors import ConfigError
from octavo.nn.arguments import check_choice, check_eps, check_probability, check_sizes, check_whole


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_sizes_are_whole_and_positive(value):
    with pytest.raises(ConfigError, match="width must be a whole number of at least 1, not "):
        check_sizes(width=value)


def test_allowed_options_are_accepted():
    check_sizes(width=1, unset=None)
    check_whole("window", 0, least=0)
    check_choice("kind", "b", ("a", "b"))
    check_probability("dropout", 0.0)
    check_eps(1e-9)


def test_a_choice_names_what_is_allowed():
    with pytest.raises(ConfigError, match="kind must be one of a, b, not 'c'"):
        check_choice("kind", "c", ("a", "b"))


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_probabilities_leave_something(value):
    with pytest.raises(ConfigError, match="dropout must be a probability of at least 0 and under 1"):
        check_probability("dropout", value)


@pytest.mark.parametrize("value", [0.0, -1e-5, float("inf"), float("nan")])
def test_eps_is_positive(value):
    with pytest.raises(ConfigError, match="eps must be a positive number"):
        check_eps(value)
