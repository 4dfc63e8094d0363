"""Verification of an exported folder in a fresh process.

The reference is octavo's emulation of the exported model; the other process has only the folder. The comparison is
described in ``octavo.export.lockstep``.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import octavo
from octavo.checkpoints import Contents, FileFormat
from octavo.checkpoints.schemes import BLOCK, scheme_of
from octavo.errors import CheckpointError
from octavo.export.lockstep import LockstepAgreement, ReferenceProbe, save_probe
from octavo.export.reload import OCTAVO, TRANSFORMERS
from octavo.parsing import parse_json

__all__ = ["TOLERANCE", "decoded_layers", "reader_note", "reader_of", "verify"]

# Relative. Correct exports differ by up to 2.4e-4 (docs/concepts/verification.md), inputs that are not cast by 1e-2.
TOLERANCE = 1e-3
PROBE = "probe.safetensors"
COMPRESSED_TENSORS = "compressed-tensors"


def reader_of(fmt: FileFormat, contents: Contents) -> str:
    """Program for reading a format back: transformers for compressed-tensors if installed, otherwise octavo.

    Transformers runs hf-fp8 only on GPUs, reads modelopt and octavo only by octavo's own quantizer, and decodes no
    experts with a scale a block (5.23 multiplies their codes by the scales as they are).
    """
    installed = all(find_spec(name) is not None for name in ("transformers", "compressed_tensors"))
    decodes = not _has_experts_in_blocks(contents)
    return TRANSFORMERS if fmt.name == COMPRESSED_TENSORS and installed and decodes else OCTAVO


def _has_experts_in_blocks(contents: Contents) -> bool:
    return any(
        scheme_of(contents.layers[path].recipe).weight == BLOCK for path in contents.unfused if path in contents.layers
    )


def decoded_layers(contents: Contents, reader: str) -> tuple[str, ...]:
    """Paths of FP8 layers whose weights the reader decodes when it loads, so that it does not cast their inputs."""
    return tuple(path for path in contents.unfused if path in contents.layers) if reader == TRANSFORMERS else ()


def reader_note(fmt: FileFormat, contents: Contents, reader: str) -> tuple[str, ...]:
    """Note on a folder for transformers that octavo read back itself, or whose experts transformers decodes."""
    if decoded_layers(contents, reader):
        decodes = "transformers decodes the weights of experts when it loads and does not cast their inputs"
        return (f"{decodes}: it was compared with that, and octavo's reading of the folder with casts of all inputs",)
    if fmt.name != COMPRESSED_TENSORS or reader != OCTAVO:
        return ()
    if _has_experts_in_blocks(contents):
        return ("read back by octavo alone: transformers does not decode experts with a scale a block",)
    return ("read back by octavo alone, without transformers and compressed-tensors; pip install 'octavo[export]'",)


def verify(folder: Path, probe: ReferenceProbe, *, reader: str, scratch: Path) -> LockstepAgreement:
    """Read a folder in a fresh process and compare it with a probe.

    Args:
        folder: to read.
        probe: of the reference.
        reader: from :func:`reader_of`.
        scratch: an existing folder for the probe's file.

    Raises:
        CheckpointError: the folder cannot be read, or differs by more than :data:`TOLERANCE`.
    """
    save_probe(probe, scratch / PROBE)
    command = [sys.executable, "-m", "octavo.export.reload", str(folder), str(scratch / PROBE), reader]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CheckpointError(f"the written folder cannot be read back by {reader} and was removed: {message}")
    agreement = LockstepAgreement(**parse_json(done.stdout.strip().splitlines()[-1], allow_nan=True))
    if not agreement.within(TOLERANCE):
        raise CheckpointError(
            f"the written folder gives other results when {reader} reads it and was removed: logits differ by "
            f"{agreement.logits_error:.2g}, the input of {agreement.worst_layer!r} by {agreement.worst_error:.2g} (at "
            f"most {TOLERANCE:g} is allowed), and {agreement.greedy_equal} of {agreement.greedy_tokens} greedy tokens "
            f"are the same{_known_limit(probe, reader)}"
        )
    return agreement


def _known_limit(probe: ReferenceProbe, reader: str) -> str:
    """Hint for a layer with input [B·T, K]: the "token" of compressed-tensors is the second of three dimensions."""
    flat = next((path for path, x in probe.inputs.items() if x.ndim < 3), None)
    if flat is None or reader != TRANSFORMERS:
        return ""
    return (
        f"; {flat!r} receives all tokens in one dimension, for which compressed-tensors uses a single scale instead of "
        "one per token: skip such layers (--skip), or cast only weights (--recipe weight_only)"
    )


def _environment() -> dict[str, str]:
    """Environment of the fresh process: the same octavo and number of threads."""
    package_root = str(Path(octavo.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())}
