"""Commands that left the wheel name the ones that replace them."""

import pytest

OLD = {("bench", "hopper"): "benchmarks.hopper", ("doctor", "selftest"): "benchmarks.doctor_selftest"}


@pytest.mark.parametrize("command", OLD, ids=" ".join)
@pytest.mark.parametrize("arguments", [[], ["--help"], ["--quick", "--only", "casts"], ["--from", "one.json", "x"]])
def test_an_old_command_names_its_replacement(octavo, command, arguments):
    result = octavo(*command, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: octavo {' '.join(command)} is no longer part of the installed package; in a checkout of octavo's "
        f"repository, run python -m {OLD[command]} with the same options\n"
    )


@pytest.mark.parametrize("command", OLD, ids=" ".join)
def test_an_old_command_is_not_listed(octavo, command):
    group, name = command
    assert name not in octavo(group, "--help").stdout
