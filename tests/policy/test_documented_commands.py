"""Every ``octavo …`` line of README, docs/ and the Makefile is one that the application takes.

A line of a block must parse as it stands: its command exists, takes these options and has every argument that it needs.
Code inside a sentence may leave arguments out. What runs a block is in tests/documented_blocks.py; here a block that
nothing runs is found.
"""

import re
import shlex
import tomllib
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli.app import app
from tests.documented_blocks import (
    FORMATS,
    LANGUAGES,
    NOT_RUN,
    OWN_TEST,
    PAGES,
    PROGRAMS,
    RUN_BY,
    SHOWN,
    blocks,
    commands,
    comparison_of,
    reason_not_to_run,
)
from tests.policy.source_tree import ROOT
from tests.policy.test_documents import BY_NAME, FENCE, INLINE, fences

SHELLS = ("", "bash", "console", "sh", "text")
COMMAND = re.compile(r"^\s*(?:\$ |@)?(?:\.venv/bin/)?octavo (?=-|[a-z])")
EXTRAS = re.compile(r"pip install [\"']?(?:octavo|\.)\[([\w,-]+)\]")


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
    lines = [line for _, block in fences(text, *SHELLS) for line in block.replace("\\\n", " ").splitlines()]
    return [COMMAND.sub("", line.partition(" > ")[0]) for line in lines if COMMAND.match(line)]


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


BLOCKS = [(name, *block) for name, page in PAGES.items() for block in blocks(page)]
SHELL = [(name, command) for name, language, _, block in BLOCKS if language == "bash" for command in commands(block)]


def test_every_block_is_run_or_named_with_a_reason():
    """A fence that the pattern of the tests does not see, such as an indented one, is one that none of them runs."""
    fences = {name: page.read_text().count("```") for name, page in PAGES.items()}
    assert {name: 2 * sum(block[0] == name for block in BLOCKS) for name in PAGES} == fences
    assert {(name, language) for name, language, _, _ in BLOCKS if language not in LANGUAGES} == set()
    unknown = {
        (name, command)
        for name, command in SHELL
        if name not in OWN_TEST and reason_not_to_run(command) is None and command.split()[0] not in PROGRAMS
    }
    assert unknown == set()
    texts = {(name, text) for name, language, _, text in BLOCKS if language == "text"}
    assert {(name, text) for name, text in texts if comparison_of(name, text) is None} == set()


def test_formats_page_shows_what_the_command_prints():
    (table,) = [text for name, _, _, text in BLOCKS if comparison_of(name, text) == FORMATS]
    printed = {line.strip() for line in CliRunner().invoke(app, ["formats"]).stdout.splitlines()}
    assert set(table.splitlines()) <= printed


def test_every_reason_belongs_to_a_block():
    listed = {command for _, command in SHELL}
    assert {command for command in RUN_BY if command not in listed} == set()
    assert {start for start in NOT_RUN if not any(command.startswith(start) for command in listed)} == set()
    texts = [(name, text) for name, language, _, text in BLOCKS if language == "text"]
    unused = {(page, start) for page, start in SHOWN if not any(n == page and t.startswith(start) for n, t in texts)}
    assert unused == set()
    assert all((ROOT / script).exists() for script in OWN_TEST.values())
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
