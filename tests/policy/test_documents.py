"""README and docs/ are true: their paths and links exist, their commands are real, their Python runs."""

import ast
import importlib.util
import itertools
import re
import sys
import warnings
from typing import Any

import pytest
import typer

from octavo.cli.app import app
from tests.documented_blocks import PRINTED, asks_a_server, comparison_of
from tests.policy.source_tree import ROOT

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
BY_NAME = {str(page.relative_to(ROOT)): page for page in PAGES}

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")
PATH = re.compile(r"(?<![\w/.-])(?:src|tests|docs|scripts|benchmarks|examples)/[\w./-]*[\w/]")

# Dependencies of octavo itself: a page is never skipped for lack of one.
REQUIRED = {"numpy", "octavo", "rich", "safetensors", "tokenizers", "tomli_w", "torch", "typer"}

# The names at the start of a line of the file map, with one space between them: "  backend.py dispatch.py   who runs".
DRAWN = re.compile(r"^ *((?:[\w./-]+(?:/|\.\w+)(?: |$))*)")


def fences(text, *languages):
    return [(m.start(), m[2]) for m in FENCE.finditer(text) if m[1] in languages]


def commands(text, program):
    """The word after ``program`` in code, inline or at the start of a line of a block: ``octavo train`` → train."""
    code = [m[1] for m in INLINE.finditer(FENCE.sub("", text))]
    code += [line for _, block in fences(text, "", "bash", "console", "sh", "text") for line in block.splitlines()]
    pattern = re.compile(rf"^\s*(?:\$ )?(?:\.venv/bin/)?{program} ([a-z][\w-]*)")
    return {m[1] for line in code if (m := pattern.match(line))}


def makefile_targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def file_map(page):
    """Paths in the drawn tree: the block that starts with ``src/octavo/``, indented by two spaces a level."""
    blocks = [block for _, block in fences(page, "", "text") if block.lstrip().startswith("src/octavo/")]
    assert len(blocks) == 1, "no file map: a block whose first line is src/octavo/"
    folders: list[str] = []
    paths: list[str] = []
    for line in filter(str.strip, blocks[0].splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        names = DRAWN.findall(line)[0].split()
        assert names, f"file map: no path at the start of {line!r}"
        paths += ["".join(folders[:depth]) + name for name in names]
        folders[depth:] = names[-1:] if names[-1].endswith("/") else []
    return paths


def test_file_map_exists():
    paths = file_map(ARCHITECTURE.read_text())
    assert not [path for path in paths if not (ROOT / path).exists()]
    rows = {p.name for p in (ROOT / "src/octavo").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    drawn = {path.removeprefix("src/octavo/").rstrip("/") for path in paths if path.startswith("src/octavo/")}
    assert not rows - drawn - {"__main__.py"}, "in src/octavo but not in ARCHITECTURE.md's file map"


@pytest.mark.parametrize("name", BY_NAME)
def test_paths_and_links_exist(name):
    page = BY_NAME[name]
    text = page.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    local = [link for link in LINK.findall(text) if not re.match(r"\w+:", link)]
    missing += [link for link in local if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("name", BY_NAME)
def test_commands_are_real(name):
    text = BY_NAME[name].read_text()
    group: Any = typer.main.get_command(app)
    assert commands(text, "octavo") <= group.commands.keys()
    assert commands(text, "make") <= makefile_targets()


def test_readme_shows_the_two_commands_first():
    first_screen = "\n".join(README.read_text().splitlines()[:40])
    assert {"demo", "test"} <= commands(first_screen, "make")


def optional_libraries(block):
    """Top-level packages that a block imports, apart from Python's own and those that octavo always needs."""
    nodes = list(ast.walk(ast.parse(block)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - REQUIRED


@pytest.mark.parametrize("name", [name for name, page in BY_NAME.items() if fences(page.read_text(), "python")])
def test_python_runs(name, tmp_path, monkeypatch, capsys):
    """A page's blocks run one after the other in one namespace, in an empty folder, and print what the page shows.

    A page is skipped if a library that its blocks import is not installed. Deprecations in such a library's own code
    are ignored. What asks a server runs beside one, in tests/integration/test_how_to.py.
    """
    monkeypatch.chdir(tmp_path)
    text = BY_NAME[name].read_text()
    libraries = set().union(*(optional_libraries(block) for _, block in fences(text, "python")))
    if missing := sorted(library for library in libraries if importlib.util.find_spec(library) is None):
        pytest.skip(f"{name} needs {', '.join(missing)}, not installed")
    namespace, printed = {"__name__": "__main__"}, ""
    for match in FENCE.finditer(text):
        language, block = match.groups()
        if language == "python" and not asks_a_server(block):
            line = text[: match.start()].count("\n") + 1
            run_strictly(compile("\n" * line + block, ROOT / name, "exec"), namespace, libraries)
            printed = capsys.readouterr().out
        elif language == "text" and comparison_of(name, block) == PRINTED:
            assert printed.endswith(block)


def run_strictly(code, namespace, libraries):
    """Run code whose file is the page, where inspect finds the source; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for library, category in itertools.product(libraries, (DeprecationWarning, FutureWarning)):
            warnings.filterwarnings("ignore", category=category, module=rf"{library}(\.|$)")
        exec(code, namespace)


PAGE = """Run `octavo nothing`.
```bash
$ octavo train --x
make demo
```
```text
src/octavo/
  a.py b.py   two
  c/ folder
    d.py
docs/
```
"""


def test_optional_libraries_are_those_beside_octavo_s_own():
    block = "import os.path, torch\nimport peft.tuners as tuners\nfrom octavo.compat import x\nfrom datasets import y"
    assert optional_libraries(block) == {"peft", "datasets"}


def test_the_readings_see_what_they_should():
    assert commands(PAGE, "octavo") == {"nothing", "train"}
    assert commands(PAGE, "make") == {"demo"}
    inside = ["a.py", "b.py", "c/", "c/d.py"]
    assert file_map(PAGE) == ["src/octavo/", *(f"src/octavo/{name}" for name in inside), "docs/"]
