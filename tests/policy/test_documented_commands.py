"""Every ``octavo …`` line of README, docs/ and the Makefile is one that the application takes.

A line of a block must parse as it stands: its command exists, takes these options and has every argument that it needs.
Code inside a sentence may leave arguments out. tests/integration/test_tutorial.py runs the commands of the tutorial,
and of README those that are not ``make`` or ``pip``.
"""

import re
import shlex
import tomllib
from typing import Any

import pytest
import typer

from octavo.cli.app import app
from tests.policy.source_tree import ROOT
from tests.policy.test_documents import BY_NAME, FENCE, INLINE, README, fences

LANGUAGES = ("", "bash", "console", "sh", "text")
COMMAND = re.compile(r"^\s*(?:\$ |@)?(?:\.venv/bin/)?octavo (?=-|[a-z])")
EXTRAS = re.compile(r"pip install [\"']?(?:octavo|\.)\[([\w,-]+)\]")
# README's commands that are not octavo's: the script of CI that runs them, or the same with fewer steps, and how.
RUN_BY = {
    "pip install torch==2.13.0": ("scripts/venv.sh", 'pip_install "$torch_pin"'),
    'pip install ".[report,hf]"': ("scripts/venv.sh", "--editable ."),
    "make demo": ("scripts/wheel.sh", "octavo demo --quick"),
    "make test": (".ci/run", "make test"),
}


class RefusedError(Exception):
    """A line that the application does not take."""


def parse(line, *, abbreviated=False):
    """Parse a command line as the application does, without running the command.

    Args:
        line: what follows ``octavo``.
        abbreviated: accept missing arguments, and a last option without its value.
    """
    command: Any = typer.main.get_command(app)
    context, words = None, shlex.split(line, comments=True)
    name = "octavo"
    try:
        while True:
            context = command.make_context(name, words, parent=context)
            if not hasattr(command, "commands"):
                return
            name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    except typer.Exit:
        return  # --help and --version end the parsing
    except Exception as error:
        kind = type(error).__name__
        if not (abbreviated and kind in {"MissingParameter", "BadOptionUsage", "NoArgsIsHelpError"}):
            raise RefusedError(f"octavo {line}: {kind}: {error}") from error


def blocks_of(text):
    lines = [line for _, block in fences(text, *LANGUAGES) for line in block.replace("\\\n", " ").splitlines()]
    return [COMMAND.sub("", line) for line in lines if COMMAND.match(line)]


def sentences_of(text):
    return [COMMAND.sub("", code) for code in INLINE.findall(FENCE.sub("", text)) if COMMAND.match(code)]


@pytest.mark.parametrize("name", [name for name, page in BY_NAME.items() if "octavo " in page.read_text()])
def test_commands_parse(name):
    text = BY_NAME[name].read_text()
    for line in blocks_of(text):
        parse(line)
    for line in sentences_of(text):
        parse(line, abbreviated=True)


def test_makefile_runs_a_command_that_exists():
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if COMMAND.match(line)]
    assert lines
    for line in lines:
        parse(COMMAND.sub("", line))


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [names for page in BY_NAME.values() for names in EXTRAS.findall(page.read_text())]
    assert named
    assert {extra for names in named for extra in names.split(",")} <= extras.keys()


EXTRA_OF = {"serve": "serve", "export": "export", "doctor": "report"}  # a command's, or that of one of its options


def test_tutorial_names_the_extras_of_its_commands():
    pages = [BY_NAME[name].read_text() for name in sorted(BY_NAME) if name.startswith("docs/tutorial/")]
    programs = {line.split()[0] for page in pages for line in blocks_of(page)}
    named = {extra for names in EXTRAS.findall(pages[0]) for extra in names.split(",")}
    assert {EXTRA_OF[program] for program in programs & EXTRA_OF.keys()} == named


def test_every_command_of_readme_runs_in_ci():
    lines = "".join(block for _, block in fences(README.read_text(), "bash")).splitlines()
    assert {line.partition("  #")[0].strip() for line in lines if not COMMAND.match(line)} == RUN_BY.keys()
    assert all(words in (ROOT / script).read_text() for script, words in RUN_BY.values())


@pytest.mark.parametrize(
    "line",
    [
        "trian --out runs/mine",
        "train --no-such-option",
        "train --steps many",
        "export runs/mine extra",
        "doctor preflight",
        "calibrate",
        "calibrate runs/mine --samples",
    ],
)
def test_a_line_that_the_application_does_not_take_is_found(line):
    with pytest.raises(RefusedError):
        parse(line)
