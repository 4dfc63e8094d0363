"""An export is not done until something else has read it and agreed.

The reference is octavo's emulation of what was exported; the other side is a fresh process that has nothing but the
folder. What is compared, and why not just logits, is in ``octavo.export.agreement``.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import octavo
from octavo.errors import CheckpointError
from octavo.export.agreement import Agreement, Probe, save_probe
from octavo.export.reload import OCTAVO, TRANSFORMERS
from octavo.interchange import FileFormat
from octavo.parsing import parse_json

__all__ = ["TOLERANCE", "reader_of", "verify"]

TOLERANCE = 1e-3  # relative; what is right differs by up to 2.4e-4 (docs/export.md), inputs that are not cast by 1e-2
PROBE = "probe.safetensors"


def reader_of(fmt: FileFormat) -> str:
    """Who reads a format back: transformers where it computes what the format says, octavo otherwise.

    Transformers' own fp8 has kernels for GPUs alone, and it has no reader for ModelOpt's files or octavo's.
    """
    installed = all(find_spec(name) is not None for name in ("transformers", "compressed_tensors"))
    return TRANSFORMERS if fmt.name == "compressed-tensors" and installed else OCTAVO


def verify(folder: Path, probe: Probe, *, reader: str, scratch: Path) -> Agreement:
    """Read a folder in a process of its own and compare.

    Args:
        folder: to read.
        probe: of the reference.
        reader: from :func:`reader_of`.
        scratch: an existing folder for the probe's file.

    Raises:
        CheckpointError: the folder cannot be read, or computes something else.
    """
    save_probe(probe, scratch / PROBE)
    command = [sys.executable, "-m", "octavo.export.reload", str(folder), str(scratch / PROBE), reader]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CheckpointError(f"what was written cannot be read back by {reader}, and is removed: {said}")
    found = Agreement(**parse_json(done.stdout.strip().splitlines()[-1], allow_nan=True))
    if not found.within(TOLERANCE):
        raise CheckpointError(
            f"what was written computes something else when {reader} reads it, and is removed: logits differ by "
            f"{found.logits_error:.2g}, the input of {found.worst_layer!r} by {found.worst_error:.2g} (at most "
            f"{TOLERANCE:g} is the same model), and {found.greedy_equal} of {found.greedy_tokens} greedy tokens are "
            f"the same{_known_limit(probe, reader)}"
        )
    return found


def _known_limit(probe: Probe, reader: str) -> str:
    """What compressed-tensors does to a layer that is given [B·T, K]: its "token" is the second dimension of three."""
    flat = next((path for path, x in probe.inputs.items() if x.ndim < 3), None)
    if flat is None or reader != TRANSFORMERS:
        return ""
    return (
        f"; {flat!r} is given all tokens in one dimension, and compressed-tensors takes one scale for all of "
        "those where there should be one each: skip such layers (--skip), or cast weights alone (--recipe weight_only)"
    )


def _environment() -> dict[str, str]:
    """This process's, in which the same octavo is found, with as many threads."""
    own = str(Path(octavo.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())}
