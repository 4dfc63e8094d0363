"""One name, two forms: ``octavo doctor RUN`` and ``octavo doctor SUBCOMMAND``."""

import pytest


def test_help_shows_both_forms_their_options_and_the_subcommands(octavo):
    words = " ".join(octavo("doctor", "--help").stdout.split())
    assert "Usage: octavo doctor [RUN] [OPTIONS] Usage: octavo doctor COMMAND" in words
    assert "--env" in words
    assert "examine" not in words


def test_no_arguments_show_help(octavo):
    assert "Usage: octavo doctor [RUN]" in octavo("doctor").output


def test_other_word_is_a_run(octavo, tmp_path):
    result = octavo("doctor", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "holds no run" in result.stderr


@pytest.mark.parametrize("arguments", [["--json"], ["--env", "a-run"]])
def test_run_and_env_are_exclusive(octavo, arguments):
    result = octavo("doctor", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
