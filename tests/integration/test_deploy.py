"""Commands of docs/how-to/export-for-tensorrt.md in order on a CPU; NVIDIA's two programs are stand-ins.

trtexec records its arguments and writes an empty engine; tritonserver lists the repository.
"""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from octavo.cli.app import app
from tests.documented_blocks import PAGES, blocks

pytestmark = pytest.mark.long

pytest.importorskip("onnx")

RUN = """
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
num_kv_heads = 1

[data]
vocab_size = 300
[training]
steps = 4
batch_size = 4
context = 32
warmup = 1
eval_interval = 2
eval_tokens = 512
checkpoint_interval = 2
"""
PROGRAMS = {
    "octavo": f'#!/bin/sh\nexec {sys.executable} -m octavo "$@"\n',
    "trtexec": '#!/bin/sh\n[ "$1" = --help ] && exec echo --stronglyTyped\necho "$@" >> asked\n> model.engine\n',
    "tritonserver": '#!/bin/sh\nfind "${1#--model-repository=}" -name model.engine\n',
}


@pytest.fixture
def workplace(tmp_path):
    """A folder with a trained run, and the programs."""
    (tmp_path / "own.txt").write_text("".join(f"{n} times {n % 7} makes {n * (n % 7)}.\n" for n in range(2000)))
    (tmp_path / "run.toml").write_text(RUN)
    setting = ["--config", tmp_path / "run.toml", "--data", tmp_path / "own.txt", "--recipe", "bf16"]
    result = CliRunner().invoke(app, [str(arg) for arg in ["train", *setting, "--out", tmp_path / "runs/mine"]])
    assert result.exit_code == 0, result.output
    (tmp_path / "programs").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "programs" / name).write_text(text)
        (tmp_path / "programs" / name).chmod(0o755)
    return tmp_path


def test_the_walk(workplace):
    shown = [block for language, _, block in blocks(PAGES["docs/how-to/export-for-tensorrt.md"]) if language == "bash"]
    environment = os.environ | {"PATH": f"{workplace / 'programs'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-c", "".join(shown)],
        cwd=workplace, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "7 of 8 linear layers in FP8; opset 21, fp16" in done.stdout
    assert done.stdout.endswith("repository/models/tensorrt/1/model.engine\n")

    deployed = workplace / "deployed"
    report = json.loads((deployed / "report.json").read_text())
    assert set(report["files"]) == {path.name for path in deployed.iterdir()} - {"asked", "model.engine"}
    assert [each["wrong_codes"] for each in report["engines"]] == [0, 0]
    assert json.loads((deployed / "calibration.json").read_text())["recipe"] == "static"
    built, timed = (deployed / "asked").read_text().splitlines()
    assert built == (
        "--onnx=model.onnx --stronglyTyped --saveEngine=model.engine "
        "--minShapes=input_ids:1x1 --optShapes=input_ids:16x32 --maxShapes=input_ids:16x32"
    )
    assert timed == "--loadEngine=model.engine --shapes=input_ids:16x32 --warmUp=100 --duration=30"
