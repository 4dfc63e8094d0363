"""FP8 checkpoints of ``octavo export``: write, verify, and list what servers do with them."""

from dataclasses import asdict
from typing import Any

import torch

from octavo.cli import options
from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.export_job import Job
from octavo.cli.progress import open_display, phases
from octavo.errors import ConfigError
from octavo.export import SavedCheckpoint, save_quantized
from octavo.export.checkpoint_writer import DTYPES
from octavo.export.servers import DOES, SOURCES
from octavo.export.sources import load_source
from octavo.export.verification import TOLERANCE
from octavo.files import claimed_folder
from octavo.numerics.cast_spec import check_member

__all__ = ["size_of", "verdict", "write_checkpoint"]

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def write_checkpoint(job: Job, *, as_json: bool) -> None:
    """Write a folder of safetensors and print a summary."""
    if job.dtype is not None:
        check_member("--dtype", job.dtype, tuple(DTYPES))
    place = options.device_of(job.checkpoint.device)
    max_shard_bytes = size_of(job.checkpoint.max_shard_size or "5GB")
    with claimed_folder(job.out), open_display() as display:
        show = phases(display)
        show("load", 0, 1)
        source = load_source(job.model, job.format, job.request, device=place)
        saved = save_quantized(
            source.language_model,
            job.out,
            format=job.format,
            kv_scales=source.kv_scales,
            tables=source.tables,
            dtype=job.dtype or DTYPE_NAMES[source.dtype or torch.bfloat16],
            max_shard_bytes=max_shard_bytes,
            fnuz=job.checkpoint.fnuz,
            verify_folder=not job.checkpoint.no_verify,
            on_phase=show,
        )
    if as_json:
        print_json(_record(saved))
    else:
        _print(saved)


def size_of(size: str) -> int:
    """Return the bytes of a size such as ``"500MB"``.

    Raises:
        ConfigError: not a positive integer followed by a unit.
    """
    for unit, factor in UNITS.items():
        count = size.upper().removesuffix(unit)
        if count != size.upper() and count.strip().isdecimal() and int(count):
            return int(count) * factor
    raise ConfigError(f"--max-shard-size must be a number with {', '.join(UNITS)}, such as 500MB, not {size!r}")


def _record(saved: SavedCheckpoint) -> dict[str, Any]:
    return {**asdict(saved), "folder": str(saved.folder), "servers": dict(DOES[saved.format])}


def _print(saved: SavedCheckpoint) -> None:
    rows = [(scheme, number(count)) for scheme, count in saved.schemes.items()]
    rows.append(("high precision: " + ", ".join(saved.left_out[:3]), number(len(saved.left_out))))
    print_table(f"{saved.folder}, {saved.format}", ["layers", ""], rows)
    share = saved.nbytes / saved.bf16_nbytes
    print_lines(
        f"{number(saved.nbytes)} bytes of weights, {share:.3f} times as many as in BF16",
        *(f"note: {note}" for note in saved.notes),
        verdict(saved),
    )
    servers = [(server, does, SOURCES[server]) for server, does in DOES[saved.format].items()]
    print_table("Support by servers", ["", "weights and inputs", "source"], servers, left=3)


def verdict(saved: SavedCheckpoint) -> str:
    """Sentence about the verification of a checkpoint."""
    agreement = saved.agreement
    if agreement is None:
        return "not verified"
    return (
        f"verified by {saved.reader}: layer by layer, logits differ by {agreement.logits_error:.1e} (at most "
        f"{TOLERANCE:g}) and {agreement.greedy_equal} of {agreement.greedy_tokens} greedy tokens agree; end to end, "
        f"logits differ by {agreement.free_error:.1e} and {agreement.free_equal} agree"
    )
