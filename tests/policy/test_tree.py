"""What every file of the checkout keeps to: its size, its name, and nothing that belongs to one machine."""

import ast
import re

import pytest

from tests.policy.source_tree import ROOT, modules, tracked_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 45
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base_utils"}

# A path of one machine; the host of a package registry or mirror; text that only this project's planning would have.
NOT_FOR_A_REPOSITORY = {
    "a machine path": re.compile(r"(?<![\w.])/(?:work|root|home|opt|Users)/[\w.]"),
    "a registry host": re.compile(
        r"https?://[^\s/]*(?:pypi|pythonhosted|npmjs|debian|registry|mirror|artifact)", re.IGNORECASE
    ),
    "an index option": re.compile(r"--(?:extra-)?index-url[ =]\S"),
    "a planning file": re.compile(r"\bshared/\w+\.(?:md|txt)\b"),
}


def python_files():
    return [path for path in tracked_files() if path.suffix == ".py"]


def test_files_are_short():
    long = {
        str(p.relative_to(ROOT)): n for p in python_files() if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {code_lines(node)}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def code_lines(function):
    """Lines of the body after the docstring, which may teach at any length."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_names_say_something():
    vague = [path for path in python_files() if NAMES_THAT_SAY_NOTHING & set(re.split(r"_|\.", path.name))]
    assert not vague


def test_packages_hand_names_on_and_define_nothing():
    defining = {}
    for name, path in modules().items():
        if path.name != "__init__.py":
            continue
        statements = [node for node in ast.parse(path.read_text()).body if not _hands_on(node)]
        if statements:
            defining[name] = [ast.unparse(node).splitlines()[0] for node in statements]
    assert not defining


def _hands_on(node: ast.stmt) -> bool:
    """A docstring, an import, or ``__all__`` or ``__version__``; what type checkers read instead of another import."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING") and all(map(_hands_on, [*node.body, *node.orelse]))
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node) == "__version__: str"
    if isinstance(node, ast.Assign):
        return all(isinstance(t, ast.Name) and t.id in {"__all__", "__version__"} for t in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("what", NOT_FOR_A_REPOSITORY)
def test_text_belongs_to_no_machine(what):
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # pictures and the like
        hits = (i for i, line in enumerate(lines, 1) if NOT_FOR_A_REPOSITORY[what].search(line))
        found += [f"{path.relative_to(ROOT)}:{i}" for i in hits]
    assert not found, f"{what} in {found}"


def test_skips_say_why():
    bare = re.compile(
        r"pytest\.skip\(\s*\)|@pytest\.mark\.skip\b(?!\()|mark\.skip\(\s*\)|mark\.skipif\((?![^@]*reason=)"
    )
    silent = [path for path in python_files() if "tests" in path.parts and path.name != "test_tree.py"]
    assert not [path for path in silent if bare.search(path.read_text())]
