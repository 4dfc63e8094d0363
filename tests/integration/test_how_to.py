"""The commands of how-to pages run in the order of their page, on a small run, model file and texts.

The folder has what the pages assume: a model.gguf, and runs/mine, which has a fault to find. Not run here: servers and
what sends them requests (test_tutorial.py, test_triton_server.py), several ranks (test_ranks_launch.py), the Hub and
loggers of the network, and commands that take minutes on the smallest model (studies, tuning, windows of 2,048 tokens).
"""

import shutil

import pytest
from typer.testing import CliRunner

from octavo.cli.app import app
from tests.integration.test_tutorial import arguments, blocks, commands
from tests.policy.source_tree import ROOT
from tests.unit.models import small_gguf

pytestmark = pytest.mark.long

PAGES = (
    "calibrate", "check-a-run", "debug-a-loss-spike", "export-for-vllm", "find-sensitive-layers",
    "import-a-model", "use-the-autopilot", "use-your-own-text",
)  # fmt: skip
TRAINED_BY = {"use-the-autopilot": "runs/mine", "debug-a-loss-spike": "runs/bf16"}
ELSEWHERE = ("--hub", "octavo serve", "octavo bench")
SMALL = """
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 4
num_kv_heads = 2
[data]
source = "own.txt"
vocab_size = 300
[training]
recipe = "delayed"
recipe_options = { margin = 20 }
statistics_interval = 1
threads = 1
steps = 6
batch_size = 2
context = 32
warmup = 2
eval_interval = 3
checkpoint_interval = 3
"""
TEXT = "".join(f"{n} times {n % 7} makes {n * (n % 7)}, of course.\n" for n in range(2000))
OTHER = "".join(f"Who adds {n} and {n % 11} has got {n + n % 11}; nobody doubts it.\n" for n in range(2000))


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """Folder with what pages assume that their reader has."""
    folder = tmp_path_factory.mktemp("furnished")
    (folder / "my-texts").mkdir()
    for name, text in (("own.txt", TEXT), ("my-texts/one.txt", TEXT), ("held-out.txt", OTHER)):
        (folder / name).write_text(text)
    rows = (f'{{"question": "why {n}?", "answer": "{n} times {n % 7} makes {n * (n % 7)}"}}\n' for n in range(2000))
    (folder / "answers.jsonl").write_text("".join(rows))
    for name in ("small.toml", "long.toml"):
        (folder / name).write_text(SMALL)
    small_gguf.write(folder / "model.gguf", settings={"llama.context_length": 64})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("octavo train --config small.toml --out runs/mine")
        run("octavo train --config runs/mine/config.toml --recipe bf16 --out runs/bf16")
        run("octavo export model.gguf --format hf-fp8 --out downloaded")
    return folder


def run(command):
    """Standard output of a command, which succeeds; the doctor also exits with 1, for a finding."""
    result = CliRunner().invoke(app, arguments(command), prog_name="octavo")
    expected = {0, 1} if command.startswith("octavo doctor") else {0}
    assert result.exit_code in expected, f"{command}\n{result.output}\n{result.exception!r}"
    return result.stdout


def smaller(command):
    """The command, with the small model's settings where it would train the default one."""
    return f"{command} --config small.toml" if "octavo train" in command and "--config" not in command else command


@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page, furnished, tmp_path, monkeypatch):
    for library in ("compressed_tensors", "transformers"):
        pytest.importorskip(library, reason=f"{library} is not installed to verify the export with")
    shutil.copytree(furnished, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    if page in TRAINED_BY:
        shutil.rmtree(TRAINED_BY[page])
    lines = [
        line
        for language, _, block in blocks(ROOT / f"docs/how-to/{page}.md")
        if language in ("bash", "text")
        for line in commands(block)
        if line.startswith("octavo ") and not any(word in line for word in ELSEWHERE)
    ]
    assert lines
    for line in lines:
        assert run(smaller(line.partition("  #")[0]))
