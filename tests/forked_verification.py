"""Exports read back by forks of one process, which has imported octavo and transformers once.

A fork knows nothing of the exporting process either, and starts in a tenth of a second instead of three to eight. What
starts Python anew remains tested: ``test_a_folder_is_verified_by_another_process`` for octavo's reader,
``test_a_biased_model_with_mixed_schemes`` for transformers.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.export import verification

IMPORTED = [
    "pytest",
    "transformers.models.llama.modeling_llama",
    "compressed_tensors.quantization",
    "octavo.export.reload",
    __name__,
]
PATIENCE = 300  # seconds, for a process that hangs


def install(patch: pytest.MonkeyPatch) -> None:
    """Let :func:`octavo.export.verification.verify` fork the process that it would start."""
    patch.setattr(verification, "subprocess", SimpleNamespace(run=_run))


def _run(command: list[str], *, env: dict[str, str], **_: Any) -> "subprocess.CompletedProcess[str]":
    program, option, module, *arguments = command
    assert (program, option, module) == (sys.executable, "-m", "octavo.export.reload")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in printed:
            path.touch()
        process = context.Process(target=_read_back, args=(arguments, env, printed))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode is not None, "reading back does not end"
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in printed))


def _read_back(arguments: list[str], env: dict[str, str], printed: list[Path]) -> None:
    from octavo.export.reload import main

    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    sys.exit(main(arguments))
