"""What octavo hands out is exactly this, documented, with examples that run."""

import doctest
import importlib
import inspect
import types

import pytest
import torch

import octavo
from tests.policy.source_tree import modules

PUBLIC = {
    # formats and tensors
    "E4M3",
}

# Command-line modules are documented by --help; a doctest there would start commands.
WITH_EXAMPLES = sorted(name for name in modules() if ".cli" not in name and "__main__" not in name)


def test_all_is_exactly_this():
    assert set(octavo.__all__) == PUBLIC
    assert list(octavo.__all__) == sorted(octavo.__all__)


def test_all_names_exist_and_nothing_else_looks_public():
    submodules = {name.split(".")[1] for name in modules() if "." in name}
    shown = {name for name in vars(octavo) if not name.startswith("_")} - submodules
    assert shown <= set(octavo.__all__)
    assert all(hasattr(octavo, name) for name in octavo.__all__)


@pytest.mark.parametrize("name", sorted(octavo.__all__))
def test_public_names_are_documented(name):
    thing = getattr(octavo, name)
    if name.startswith("__"):
        return
    documented = thing if callable(thing) or isinstance(thing, types.ModuleType) else type(thing)
    text = inspect.getdoc(documented)
    assert text, f"octavo.{name} has no docstring"
    if callable(thing):
        assert ">>>" in text, f"octavo.{name} has no example"


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name):
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(module, extraglobs={"torch": torch, "octavo": octavo}):
        torch.manual_seed(0)
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
