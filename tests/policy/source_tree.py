"""The checkout as the policy tests see it: its files, its modules and who imports whom."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


def tracked_files() -> list[Path]:
    """Files that git knows, or would take: committed, staged, and new ones that .gitignore does not name."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = (ROOT / name for name in listing.split("\0") if name)
    return [path for path in files if path.is_file()]


def modules() -> dict[str, Path]:
    """Dotted name → file, for every Python file under src/, and for the stubs of compiled modules."""
    found = {}
    for path in sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")]):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """octavo modules that ``name`` imports anywhere in its text: at top level, in functions, under TYPE_CHECKING.

    ``from octavo.numerics import cast`` counts as octavo.numerics.cast where that is a file, else as octavo.numerics.
    """
    found = {_module_of(target, known) for target in targets(name, path)}
    return {target for target in found if target.split(".")[0] == "octavo" and target != name}


def targets(name: str, path: Path) -> set[str]:
    """Everything that ``name`` imports anywhere in its text, dotted, with libraries and names taken out of them."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return set(_targets(ast.parse(path.read_text()), package))


def _module_of(target: str, known: dict[str, Path]) -> str:
    """The longest known module that ``target`` starts with; empty for a library's."""
    while target and target not in known:
        target = target.rpartition(".")[0]
    return target


def _targets(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and type(arg.value) is str)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}
