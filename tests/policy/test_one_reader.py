"""What a user's file says is parsed by octavo.parsing alone, which knows how each library fails."""

import ast

from tests.policy.source_tree import modules

PARSERS = {"json.load", "json.loads", "json.JSONDecoder", "Tokenizer.from_str", "Tokenizer.from_file", "tomllib"}
PARSERS |= {"safetensors.torch.load", "safetensors.torch.load_file", "safetensors.numpy.load_file"}
# The processes in which TensorRT-RTX is called and chat templates are rendered import nothing of octavo, and read what
# octavo has written; nor does the client that is copied into a repository for Triton, which reads a server's answers.
APART = {
    "octavo.parsing",
    "octavo.onnx.tensorrt_rtx",
    "octavo.server.template_process",
    "octavo.server.triton.client",
}


def parsers_in(text):
    """Which of ``PARSERS`` a module names, and ``safe_open`` where nothing turns its errors into octavo's."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    unguarded = {"safe_open"} if "safe_open(" in text and "library_errors()" not in text else set()
    return found & PARSERS | unguarded


def test_one_module_parses():
    elsewhere = {
        name: found
        for name, path in modules().items()
        if name not in APART and path.suffix == ".py" and (found := parsers_in(path.read_text()))
    }
    assert not elsewhere, f"call octavo.parsing instead: {elsewhere}"


def test_the_check_sees_what_it_should():
    assert parsers_in("import json\njson.loads('1')") == {"json.loads"}
    assert parsers_in("from safetensors.torch import load_file, save_file") == {"safetensors.torch.load_file"}
    assert parsers_in("def late():\n    import tomllib") == {"tomllib"}
    assert parsers_in("with safe_open(path) as file: ...") == {"safe_open"}
    assert not parsers_in("import json\njson.dumps(1)\nwith library_errors(), safe_open(path) as file: ...")
