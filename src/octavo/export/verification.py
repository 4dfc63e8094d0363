"""Verification of an exported folder in a fresh process.

The reference is octavo's emulation of the exported model; the other process has only the folder. The comparison is
described in ``octavo.export.lockstep``.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

import octavo
from octavo.checkpoints import Contents, FileFormat
from octavo.checkpoints.schemes import BLOCK, Inputs, scheme_of
from octavo.errors import CheckpointError
from octavo.export.lockstep import LockstepAgreement, ReferenceProbe, save_probe
from octavo.export.reload import OCTAVO, TRANSFORMERS
from octavo.parsing import parse_json

__all__ = ["TOLERANCE", "decoded_layers", "flattened_layers", "reader_notes", "reader_of", "verify"]

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


def flattened_layers(contents: Contents, reader: str, probe: ReferenceProbe) -> tuple[str, ...]:
    """Paths of layers whose tokens the reader casts together, and that were compared with a scale a token."""
    by_token = (path for path in probe.flat_layers if scheme_of(contents.layers[path].recipe).inputs is Inputs.TOKEN)
    return tuple(by_token) if reader == TRANSFORMERS else ()


def reader_notes(fmt: FileFormat, contents: Contents, reader: str, flattened: Sequence[str]) -> tuple[str, ...]:
    """Notes on a folder for transformers that octavo read back itself, or that transformers computes otherwise."""
    notes = _notes_on_reading(fmt, contents, reader)
    if not flattened:
        return notes
    others = f" and {len(flattened) - 1} more" if len(flattened) > 1 else ""
    together = (
        f"compressed-tensors casts several tokens by one scale in {flattened[0]!r}{others}, where inputs are not "
        "[batch, tokens, features]: compared with a scale a token, as servers have; "
        "octavo.compat.huggingface.codes_config reads the folder so in transformers"
    )
    return (*notes, together)


def _notes_on_reading(fmt: FileFormat, contents: Contents, reader: str) -> tuple[str, ...]:
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
            "are the same"
        )
    return agreement


def _environment() -> dict[str, str]:
    """Environment of the fresh process: the same octavo and number of threads."""
    package_root = str(Path(octavo.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())}
