"""One direction: a file imports only from rows above its own, or from its own row; and no cycles, even in functions."""

import re
from itertools import pairwise

from octavo._lazy import LATER
from tests.policy.source_tree import ROOT, imports, modules

# The house, top row first. A row is a file or a folder under src/octavo. The package's own names ("octavo") are handed
# on from the rows above; those below may use them.
ROWS = (
    "errors",
    "caller_warnings",
    "files",
    "html",
    "parsing",
    "checksums",
    "control_groups",
    "memory",
    "curves",
    "formats",
    "numerics",
    "kernels",
    "recipes",
    "scaling",
    "functional",
    "autocast",
    "nn",
    "convert",
    "parallel",
    "_lazy",
    "octavo",
    "_former_names",
    "state",
    "models",
    "doctor",
    "text",
    "training",
    "experiments",
    "checkpoints",
    "language_model",
    "quantization",
    "export",
    "onnx",
    "engines",
    "rl",
    "inference",
    "serving",
    "bench",
    "planning",
    "server",
    "reports",
    "plot",
    "compat",
    "integrations",
    "cli",
    "__main__",
    "octavo_command",
)


def row(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def violations(graph: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} imports {target}, which stands below it"
        for module, targets in sorted(graph.items())
        for target in sorted(targets)
        if ROWS.index(row(target)) > ROWS.index(row(module))
    ]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules left when those that import nothing of the rest are taken away again and again."""
    rest = {module: set(targets) for module, targets in graph.items()}
    while leaves := {module for module, targets in rest.items() if not targets & rest.keys()}:
        rest = {module: targets for module, targets in rest.items() if module not in leaves}
    return sorted(rest)


def import_graph() -> dict[str, set[str]]:
    """Without what the package hands on later: type checkers read those imports, and nothing runs them."""
    known = modules()
    graph = {name: imports(name, path, known) for name, path in known.items()}
    graph["octavo"] -= {f"octavo.{place}" for place in LATER.values()}
    return graph


def test_every_module_has_a_row():
    unknown = sorted(name for name in modules() if row(name) not in ROWS)
    assert not unknown, f"not in the house: {unknown}"


def test_imports_go_up():
    graph = import_graph()
    assert len(graph) > 10, "the import graph is nearly empty: is src/octavo where this test looks?"
    assert not violations(graph)


def test_architecture_lists_the_rooms_in_this_order():
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## The rooms, top row first")[1].split("##")[0]
    cells = [re.findall(r"`(\w+)/?`", line.split("|")[1]) for line in section.splitlines() if line.startswith("| `")]
    levels = [[ROWS.index(name) for name in cell] for cell in cells]
    assert len(levels) > 10
    assert all(max(above) < min(below) for above, below in pairwise(levels))


def test_no_import_cycles():
    assert not cycle(import_graph())


def test_the_checks_see_what_they_should():
    graph = {
        "octavo.formats": {"octavo.numerics.cast"},
        "octavo.numerics.cast": {"octavo.formats"},
        "octavo.cli.app": set(),
    }
    assert violations(graph) == ["octavo.formats imports octavo.numerics.cast, which stands below it"]
    assert cycle(graph) == ["octavo.formats", "octavo.numerics.cast"]


def test_imports_in_functions_and_under_type_checking_are_seen(tmp_path):
    path = tmp_path / "linear.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from octavo.cli import app\n"
        "def late():\n    from ..numerics import cast, amax\n    import octavo.autocast\n"
        "    importlib.import_module('octavo.convert')\n"
    )
    names = ["cli", "cli.app", "numerics", "numerics.cast", "autocast", "convert", "nn", "nn.linear"]
    known = {f"octavo.{name}": path for name in names}
    found = imports("octavo.nn.linear", path, known)
    assert found == {f"octavo.{name}" for name in ["cli.app", "numerics.cast", "numerics", "autocast", "convert"]}


def test_a_submodule_imported_from_its_package_is_an_edge_to_the_submodule(tmp_path):
    path = tmp_path / "dispatch.py"
    path.write_text("from octavo.kernels import tracing as trace\nfrom . import backend\n")
    known = {f"octavo.kernels{name}": path for name in ("", ".tracing", ".backend", ".dispatch")}
    assert imports("octavo.kernels.dispatch", path, known) == {"octavo.kernels.tracing", "octavo.kernels.backend"}
