"""Commands, settings and requests of the pages run in the order of their page, on a small run, model file and texts.

The folder has what the pages assume that their reader has: a model.gguf, and runs/mine, which has a fault to find. What
is not run, and why: tests/documented_blocks.py. Settings are made small; nothing is left out for its time.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli.app import app
from octavo.training.config import load_config
from tests.documented_blocks import (
    OWN_TEST,
    PAGES,
    PROGRAMS,
    SERVER,
    TITLE,
    asks_a_server,
    blocks,
    commands,
    reason_not_to_run,
)
from tests.integration.page_furniture import FURNITURE, write_files
from tests.integration.test_tutorial import SECONDS, arguments, fetch, free_port, start_server
from tests.policy.source_tree import ROOT

__all__ = ["start_server"]

pytestmark = pytest.mark.long

BLOCKS = {name: blocks(page) for name, page in PAGES.items() if name not in OWN_TEST}
RUN = [
    name
    for name, found in BLOCKS.items()
    if any(language == "toml" or (language == "bash" and commands(block)) for language, _, block in found)
]
SMALLER = [  # options of the pages and what they become
    (r"--context \d+", "--context 32"),
    (r"--windows \d+", "--windows 2"),
    (r"--steps \d+", "--steps 6"),
    (r"--seeds \d+", "--seeds 2"),
    (r"--jobs \d+", "--jobs 1"),
    (r"--nproc(-per-node)? \d+", r"--nproc\1 2"),
    (r"(octavo eval (?!.*--windows).*)", r"\1 --windows 2"),
    (r" --batch 1,16", ""),
    (r"(octavo bench serve .*)", r"\1 --batch 1 --prompt 4 --answer 4"),
    (r"--name smol --name SmolLM2-135M/", "--name smol --name smol"),
    (r"hopper --rehearse", "hopper --rehearse --only accumulation"),
    (r"(octavo (?:train|study) (?!.*--config)(?!.*--resume).*)", r"\1 --config plain.toml"),
]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """Folder with what all pages assume, which its own commands make."""
    folder = tmp_path_factory.mktemp("furnished")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_octavo("octavo train --config small.toml --out runs/mine")
        run_octavo("octavo train --config runs/mine/config.toml --recipe bf16 --out runs/bf16")
        run_octavo("octavo export model.gguf --format hf-fp8 --out downloaded")
    return folder


def run_octavo(command):
    """Standard output of a command, which succeeds; the doctor also exits with 1, for a finding."""
    command, _, file = command.partition(" > ")
    result = CliRunner().invoke(app, arguments(command), prog_name="octavo")
    expected = {0, 1} if command.startswith(("octavo doctor", "octavo agree")) else {0}
    assert result.exit_code in expected, f"{command}\n{result.output}\n{result.exception!r}"
    if file:
        Path(file).write_text(result.stdout)
    return result.stdout


def run_python(command):
    """Standard output of ``python -m MODULE …``, run in this process."""
    _, option, module, *words = shlex.split(command)
    assert option == "-m"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [module, *words])
        for name in (module, f"{module}.__main__"):  # other tests of this process may have imported them
            patch.delitem(sys.modules, name, raising=False)
        with contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__")
    return printed.getvalue()


def run_ranks(command):
    """Standard output of processes that a launcher starts."""
    words = shlex.split(command)
    program = {"torchrun": "torch.distributed.run", "octavo": "octavo"}[words[0]]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", program, *words[1:]],
        env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


class Page:
    """A page that is followed in a folder: its commands, settings and requests."""

    def __init__(self, start_server):
        self.start_server = start_server
        self.port = None
        self.namespace = {"__name__": "__main__"}

    def follow(self, language, head, block):
        """Run a block."""
        if language == "toml":
            title = TITLE.search(head)
            settings = Path(title[1] if title else "settings.toml")
            settings.write_text(block)
            load_config(settings)
        elif language == "python" and asks_a_server(block):
            exec(self.at_its_server(block), self.namespace)
        elif language == "bash":
            for command in commands(block):
                if reason_not_to_run(command) is None:
                    self.run(smaller(command))

    def run(self, command):
        """Run a command."""
        program = command.split()[0]
        assert program in PROGRAMS, f"neither run by this test nor named as not run: {command}"
        if command.startswith("octavo serve"):
            self.port = free_port()
            self.start_server(f"{re.sub(r' --port [0-9]+', '', command)} --port {self.port}")
        elif program == "curl":
            assert fetch(self.at_its_server(command))
        elif program == "torchrun" or "--nproc" in command:
            run_ranks(command)
        else:
            assert {"octavo": run_octavo, "python": run_python}[program](self.at_its_server(command))

    def at_its_server(self, text):
        """Text with the port of the page's newest server for 8000, and by another name for a second server's 8001."""
        return text.replace(f"{SERVER}8000", f"{SERVER}{self.port}").replace(
            f"{SERVER}8001", f"http://localhost:{self.port}"
        )


def smaller(command):
    """The command, with settings under which it takes seconds."""
    for pattern, replacement in SMALLER:
        command = re.sub(pattern, replacement, command)
    return command


@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("name", RUN)
def test_commands_of_a_page_run(name, furnished, tmp_path, monkeypatch, start_server):
    for library in ("compressed_tensors", "transformers"):
        pytest.importorskip(library, reason=f"{library} is not installed to verify the export with")
    shutil.copytree(furnished, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    FURNITURE.get(name, list)()
    page = Page(start_server)
    for block in BLOCKS[name]:
        page.follow(*block)
