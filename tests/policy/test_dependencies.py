"""Each library that octavo imports is declared by the core or by the extra that its message names, and no other is."""

import re
import sys
import tomllib

from tests.policy.source_tree import ROOT, modules, targets

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# Brought by an environment that octavo runs in or looks at; never asked for by a user who lacks it.
GUESTS = {
    "triton": "torch's own, where there is a GPU",
    "triton_python_backend_utils": "inside Triton's server",
    "tensorrt": "where TensorRT is installed",
    "torchao": "the INT8 baseline of the repository's measurements",
    "pytorch_lightning": "a user's own",
    "lightning": "a user's own",
    "megatron": "a user's own",
    "mlflow": "a user's own, for octavo train --log",
}
# Imported by other libraries: transformers reads compressed-tensors, and TensorRT-RTX's bindings load its libraries.
INDIRECT = {"compressed-tensors", "tensorrt-rtx-cu13-libs"}
BINDINGS = {"tensorrt_rtx_bindings": "tensorrt-rtx-cu13-bindings"}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements):
    return {canonical(re.split(r"[\[<>=; ]", one)[0]) for one in requirements}


def declared():
    return names(PROJECT["dependencies"]).union(
        *(names(EXTRAS[extra]) for extra in EXTRAS if extra not in ("docs", "dev"))
    )


def imported():
    found = set()
    for name, path in modules().items():
        found |= {target.partition(".")[0] for target in targets(name, path)}
    return found - set(sys.stdlib_module_names) - {"octavo", "octavo_command", "__future__", ""} - set(GUESTS)


def test_every_import_is_declared():
    wanted = {canonical(BINDINGS.get(name, name)) for name in imported()}
    assert wanted - declared() == set()


def test_every_declared_library_is_imported():
    wanted = {canonical(BINDINGS.get(name, name)) for name in imported()}
    assert declared() - wanted - INDIRECT == set()


def test_messages_name_extras_that_exist():
    asked = set()
    for path in [*modules().values(), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]:
        for extras in re.findall(r"octavo\[([a-z, -]+)\]", path.read_text()):
            asked |= {extra.strip() for extra in extras.split(",")}
    assert asked <= set(EXTRAS)
