"""Names of the package that are loaded on first use, as a shell, a reader's tool and a type checker see them."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys

import pytest

import octavo
from octavo._lazy import LATER


@pytest.mark.long
def test_a_shell_lists_the_late_names():
    """In a fresh interpreter, where none of them has been loaded; listing them loads none."""
    probe = "import octavo, sys; print(*dir(octavo)); assert 'octavo.quantization' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert {*octavo.__all__, "__version__"} <= set(done.stdout.split())


def test_type_checkers_read_the_late_names_from_where_they_are_loaded():
    tree = ast.parse(inspect.getsource(octavo))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "_typing.TYPE_CHECKING"
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == {
        name: "octavo" if name == place else f"octavo.{place}" for name, place in LATER.items()
    }


def test_the_version_is_the_installed_one():
    assert octavo.__version__ == importlib.metadata.version("octavo")
