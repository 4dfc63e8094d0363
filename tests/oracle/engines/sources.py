"""Modules of other engines, from the files that scripts/engine_sources.py unpacks, without their requirements.

Of a project's modules the named ones are real. All others are stand-ins, whose every attribute is a class that can be
called, subclassed and used as a decorator; ``given`` replaces attributes that the arithmetic needs, such as which FP8
dtype a platform has.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["importable", "load_engine_module"]

ROOT = Path(__file__).parents[3] / "build" / "engine_sources"


class StandIn:
    """Attribute of a module that is not loaded; as a decorator it changes nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        return args[0] if args and callable(args[0]) else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __bool__(self) -> bool:
        return False


class StandInModule(ModuleType):
    real: set[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in self.real:
            return import_module(f"{self.__name__}.{name}")
        attribute: Any = type(name, (StandIn,), {}) if name[:1].isupper() else StandIn()
        setattr(self, name, attribute)
        return attribute


class StandInLoader(Loader):
    def __init__(self, real: set[str], given: Mapping[str, object]) -> None:
        self._real, self._given = real, given

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = StandInModule(spec.name)
        module.real, module.__path__ = self._real, []
        return module

    def exec_module(self, module: ModuleType) -> None:
        for name, value in self._given.items():
            setattr(module, name, value)


class EngineFinder(MetaPathFinder):
    """Finds a project's modules: real files, or stand-ins."""

    def __init__(self, folder: Path, package: str, real: set[str], given: Mapping[str, Mapping[str, object]]) -> None:
        self._folder, self._package, self._real, self._given = folder, package, real, given

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] != self._package:
            return None
        if name in self._real:
            return spec_from_file_location(name, self._folder / f"{name.replace('.', '/')}.py")
        return ModuleSpec(name, StandInLoader(self._real, self._given.get(name, {})), is_package=True)


@contextmanager
def _found_by(finder: EngineFinder, package: str) -> Iterator[None]:
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in saved:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        sys.modules.update(saved)


def load_engine_module(
    requirement: str, name: str, *, real: tuple[str, ...] = (), given: Mapping[str, Mapping[str, object]] | None = None
) -> Any:
    """Import one module of a project.

    Args:
        requirement: folder of ``build/engine_sources``.
        name: of the module.
        real: other modules of the project that are loaded from their files.
        given: attributes of stand-ins, by module.
    """
    folder = ROOT / requirement
    if not (folder / f"{name.replace('.', '/')}.py").is_file():
        pytest.skip(f"{requirement} is not unpacked: run scripts/engine_sources.py")
    package = name.split(".", maxsplit=1)[0]
    finder = EngineFinder(folder, package, {name, *real}, given or {})
    with _found_by(finder, package):
        module: Any = import_module(name)
        module.engine_finder = finder
        return module


@contextmanager
def importable(module: Any) -> Iterator[None]:
    """Let functions of a loaded module import others of its project."""
    with _found_by(module.engine_finder, module.__name__.split(".")[0]):
        yield
