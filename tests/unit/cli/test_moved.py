"""Commands that left the wheel name the ones that replace them."""

import pytest


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--rehearse", "--only", "casts"], ["--from", "one.json", "x"]])
def test_an_old_command_names_its_replacement(octavo, arguments):
    result = octavo("bench", "hopper", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "error: octavo bench hopper is no longer part of the installed package; in a checkout of octavo's repository, run "
        "python -m benchmarks.hopper with the same options"
    ]


def test_old_commands_are_not_listed(octavo):
    assert "hopper" not in octavo("bench", "--help").stdout
