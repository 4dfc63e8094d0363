"""Fenced blocks of README and docs/: what runs each, and the few commands that nothing can run here.

| language | run by                                                                                        |
| -------- | --------------------------------------------------------------------------------------------- |
| python   | tests/policy/test_documents.py; what asks a server, by tests/integration/test_how_to.py        |
| bash     | tests/integration/test_how_to.py, in the order of the page, or what ``OWN_TEST``, ``RUN_BY`` say |
| toml     | the same tests: written where a command reads it, and loaded                                  |
| text     | nothing: ``SHOWN`` says what compares it                                                       |

tests/policy/test_documented_commands.py finds a block that none of them runs, and an entry that no page has.
"""

import re
from pathlib import Path

from tests.policy.source_tree import ROOT

FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([\w.-]+)"')
LANGUAGES = {"python", "bash", "toml", "text"}
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]}
SERVER = "http://127.0.0.1:"  # where the pages' own server listens

PROGRAMS = {"curl", "octavo", "python", "torchrun"}  # that test_how_to.py runs
OWN_TEST = {  # pages that another test runs whole
    "docs/how-to/export-for-tensorrt.md": "tests/integration/test_deploy.py",
    **{name: "tests/integration/test_tutorial.py" for name in PAGES if name.startswith("docs/tutorial/")},
}
# What CI runs elsewhere, as it is or with fewer steps or ranks: the file, and words of it.
INSTALLS = ("scripts/venv.sh", "--editable .")
RUN_BY = {
    "pip install torch==2.13.0": ("scripts/venv.sh", 'pip_install "$torch_pin"'),
    "pip install octavo-0.1.0.dev0-cp311-cp311-manylinux_2_34_x86_64.whl": ("scripts/wheel.sh", '"$dist"/octavo-*.whl'),
    "pip install .": INSTALLS,
    'pip install ".[report,hf]"': INSTALLS,
    'pip install ".[report]"': INSTALLS,
    'pip install ".[serve]"': INSTALLS,
    'pip install ".[export,serve]"': INSTALLS,
    **{
        f"torchrun --nproc-per-node 2 examples/{name}.py {options}": ("tests/contract/wrappers_program.py", f'"{name}"')
        for name, options in (
            ("accelerate_on_ranks", "fsdp2"),
            ("lightning_on_ranks", "fsdp2"),
            ("trainer_on_ranks", "output fsdp2"),
        )
    },
    "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29400 --max-restarts 3 "
    "-m octavo train --config run.toml --out /shared/runs/large": (
        "tests/integration/test_ranks_launch.py",
        '"--nnodes=2"',
    ),
    "make demo": ("scripts/wheel.sh", "octavo demo --quick"),
    "make test": (".ci/run", "scripts/check.sh"),
}
# Commands that CI cannot run, by how they begin, and why.
GPU = "needs an H100 or H200"
HUB = "downloads from the Hugging Face Hub"
WANDB = "needs wandb, no development requirement; tests/unit/training/test_metric_writers.py logs to it where it is"
NOT_RUN = {
    "octavo train --data OWNER/NAME": HUB,
    "octavo train --data 'OWNER/NAME?": HUB,
    "lm_eval ": "downloads its tasks; tests/integration/test_lm_eval.py runs it on others where it is installed",
    "transformers serve ": "needs transformers[serving], which the lock does not have",
    "pip install wandb": WANDB,
    "octavo train --data novel.txt --log tensorboard,wandb": WANDB,
    "octavo triton setup": "downloads NVIDIA's server; tests/integration/test_triton_server.py runs on it where it is",
    "octavo serve repository --engine triton": "needs NVIDIA's server, as above",
    "python -m benchmarks.hopper --out": GPU,
    "scripts/gpu.sh ": GPU,
    "python -m benchmarks.study --parts": "trains for hours; tests/unit/benchmarks/test_study.py is short",
}
# Blocks of text, by how they begin: what compares them, or why nothing can.
FORMATS = "test_documented_commands.py compares it with octavo formats"
PRINTED = "test_documents.py compares it with what the Python before it prints"
EXPERTS = "docs/how-to/train-mixtures-of-experts.md"
EXPORTED_EXPERTS = "docs/how-to/deploy-mixtures-of-experts.md"
SHOWN = {
    ("docs/concepts/delayed-scaling.md", "amax "): "a formula",
    ("docs/concepts/formats.md", "name "): FORMATS,
    ("docs/concepts/onnx.md", "static input "): "a drawing",
    ("docs/concepts/scaling.md", "encode_scale "): "a formula",
    (EXPERTS, "model.layers.0.mlp.experts"): PRINTED,
    (EXPORTED_EXPERTS, "Linear("): PRINTED,
    ("docs/how-to/serve-with-triton.md", "Triton is ready "): "what NVIDIA's server prints",
    ("docs/how-to/serve.md", "smol is served at "): "what test_how_to.py waits for",
    ("docs/how-to/use-the-autopilot.md", '{"kind": "autopilot"'): "a line of a longer run",
}


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, rest of the first line and text of each block of a page."""
    return [(match[1], match[2], match[3]) for match in FENCE.finditer(page.read_text())]


def lines(block: str) -> list[str]:
    """Lines of a block of commands, those joined that a backslash divides."""
    return block.replace("\\\n", " ").splitlines()


def commands(block: str) -> list[str]:
    """Commands of a block, without comments."""
    found = [re.sub(" +", " ", line.partition("  #")[0]).strip() for line in lines(block)]
    return [command for command in found if command and not command.startswith("#")]


def asks_a_server(block: str) -> bool:
    """Whether a block of Python can run only beside the server that its page starts."""
    return SERVER in block


def reason_not_to_run(command: str) -> str | None:
    """Why a command of a page is not run here, or None."""
    if command in RUN_BY:
        return RUN_BY[command][0]
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


def comparison_of(name: str, text: str) -> str | None:
    """What compares a page's block of text, or why nothing can; None for a block that SHOWN does not have."""
    return next((reason for (page, start), reason in SHOWN.items() if page == name and text.startswith(start)), None)
