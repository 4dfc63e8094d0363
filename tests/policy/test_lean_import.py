"""``import octavo`` costs torch and nothing else: no other library, no device, no environment variable."""

import ast
import json
import os
import subprocess
import sys

from tests.policy.source_tree import ROOT, SOURCE, modules

# Run in a fresh interpreter. Torch is imported first, so that what it does is not laid at octavo's door.
# Arguments: octavo's folder; a JSON list of modules; a statement to run beside the import, as if it stood in octavo.
PROBE = """
import json, os, sys
import torch

folder, optional, extra = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
before = set(sys.modules)
read = []

class Watched(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame is not None and "_editable_" not in frame.f_code.co_filename:  # the installer's hook, not octavo
            if frame.f_code.co_filename.startswith(folder):
                read.append(f"{key} in {frame.f_code.co_filename}:{frame.f_lineno}")
                break
            frame = frame.f_back
        return super().__getitem__(key)

os.environ.__class__ = Watched
import octavo
exec(compile(extra, folder + "/extra.py", "exec"))

new = set(sys.modules) - before
print(json.dumps({
    "outside": sorted({name.partition(".")[0] for name in new} - set(sys.stdlib_module_names) - {"octavo"}),
    "optional": sorted(new & set(optional)),
    "cuda": torch.cuda.is_initialized(),
    "read": read,
}))
"""
OPTIONAL = [
    "datasets", "gguf", "jinja2", "onnx", "plotly", "pyarrow", "rich", "safetensors", "tensorboard", "tokenizers",
    "tomli_w", "torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "torchao", "transformers", "triton",
    "typer",
]  # fmt: skip


def probe(extra=""):
    command = [sys.executable, "-c", PROBE, str(SOURCE / "octavo"), json.dumps(OPTIONAL), extra]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_brings_torch_and_nothing_else():
    seen = probe()
    # numpy is torch's own companion; where torch has not loaded it yet, octavo may.
    assert set(seen["outside"]) <= {"torch", "numpy"}, f"import octavo also imports {seen['outside']}"
    assert seen["optional"] == []
    assert seen["cuda"] is False
    assert seen["read"] == []


def test_the_probe_sees_libraries_and_reads():
    seen = probe("import os, rich; os.environ.get('A'); os.getenv('B')")
    assert "rich" in seen["outside"]
    assert seen["optional"] == ["rich"]
    assert [line.split()[0] for line in seen["read"]] == ["A", "B"]


def test_no_module_reads_the_environment_at_import():
    """The same for the modules that ``import octavo`` does not load: nothing outside a function touches os.environ."""
    reads = [
        f"{name}:{line}" for name, path in modules().items() for line in _environment_reads(ast.parse(path.read_text()))
    ]
    assert not reads


def _environment_reads(tree: ast.AST) -> list[int]:
    lines = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in {
            "os.environ",
            "os.getenv",
            "environ",
            "getenv",
        }:
            lines.append(node.lineno)
        lines += _environment_reads(node)
    return lines


def test_the_static_check_sees_reads():
    seen = _environment_reads(ast.parse("import os\nA = os.environ.get('A')\ndef f():\n    return os.getenv('B')\n"))
    assert seen == [2]
