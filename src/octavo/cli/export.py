"""``octavo export``: a language model as a folder that others load, verified before it is there."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from octavo.cli import options
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.progress import open_display, phases
from octavo.errors import ConfigError
from octavo.export import Saved, save_quantized
from octavo.export.servers import DOES, SOURCES
from octavo.export.sources import Request, load_source
from octavo.export.verification import TOLERANCE
from octavo.export.writing import DTYPES
from octavo.files import claimed_folder
from octavo.interchange import FORMATS
from octavo.recipes.specs import check_member

__all__ = ["export"]

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def export(
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A run, a folder of octavo qat or of Hugging Face's, or a .gguf file."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder to write; new or empty.")],
    format_: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMATS)}.")] = "compressed-tensors",
    recipe: Annotated[
        str | None, typer.Option(help="A preset, such as rowwise, blockwise or weight_only. [default: by the format]")
    ] = None,
    power_of_two: Annotated[bool, typer.Option("--power-of-two", help="Scales of that recipe: powers of two.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Static scales of octavo calibrate.")
    ] = None,
    mix: Annotated[Path | None, typer.Option(metavar="FILE", help="A mix of octavo sensitivity: mix.toml.")] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Layers to leave out, such as '*.o_proj'; may repeat.")
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="The language-model head in FP8 too.")] = False,
    dtype: Annotated[str, typer.Option(help=f"Of all other tensors: {', '.join(DTYPES)}.")] = "bf16",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of a file, such as 500MB.")] = "5GB",
    verify: Annotated[bool, typer.Option(help="Read the folder back in a new process, and compare.")] = True,
    as_json: options.Json = False,
) -> None:
    """Write a language model in FP8 for other programs, and make sure that they compute the same."""
    check_member("--format", format_, tuple(WRITERS))
    request = Request(
        recipe=recipe,
        power_of_two=power_of_two,
        calibration=calibration,
        mix=mix,
        skip=tuple(skip or ()),
        convert_head=head,
    )
    job = Job(model, out, format_, request, dtype, _bytes(max_shard_size), verify)
    WRITERS[format_](job, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be written where."""

    model: str
    out: Path
    format: str
    request: Request
    dtype: str
    most: int
    verify: bool


def _checkpoint(job: Job, *, as_json: bool) -> None:
    """Write a folder of safetensors, and tell."""
    with claimed_folder(job.out), open_display() as display:
        show = phases(display)
        show("load", 0, 1)
        source = load_source(job.model, job.format, job.request)
        saved = save_quantized(
            source.language_model,
            job.out,
            format=job.format,
            kv_scales=source.kv_scales,
            dtype=job.dtype,
            max_shard_bytes=job.most,
            verify_folder=job.verify,
            on_phase=show,
        )
    if as_json:
        print_json(_record(saved))
    else:
        _print(saved)


def _bytes(size: str) -> int:
    """A size in words.

    Raises:
        ConfigError: it is none.
    """
    for unit, factor in UNITS.items():
        count = size.upper().removesuffix(unit)
        if count != size.upper() and count.strip().isdecimal() and int(count):
            return int(count) * factor
    raise ConfigError(f"--max-shard-size is a number and {', '.join(UNITS)}, such as 500MB, not {size!r}")


def _record(saved: Saved) -> dict[str, Any]:
    return {**asdict(saved), "folder": str(saved.folder), "servers": dict(DOES[saved.format])}


def _print(saved: Saved) -> None:
    rows = [(scheme, number(count)) for scheme, count in saved.schemes.items()]
    rows.append(("high precision: " + ", ".join(saved.left_out[:3]), number(len(saved.left_out))))
    print_table(f"{saved.folder}, {saved.format}", ["layers", ""], rows)
    share = saved.nbytes / saved.bf16_nbytes
    lines = [f"{number(saved.nbytes)} bytes of weights, {share:.3f} times as many as in BF16"]
    lines += [f"note: {note}" for note in saved.notes]
    lines.append(_verdict(saved))
    stdout().print("\n".join(lines), markup=False, soft_wrap=True)
    servers = [(server, does, SOURCES[server]) for server, does in DOES[saved.format].items()]
    print_table("Who does what with it", ["", "weights and inputs", "source"], servers, left=3)


def _verdict(saved: Saved) -> str:
    found = saved.agreement
    if found is None:
        return "not verified: nobody has read it back"
    return (
        f"verified by {saved.reader} in lockstep: logits differ by {found.logits_error:.1e} (at most {TOLERANCE:g}), "
        f"{found.greedy_equal} of {found.greedy_tokens} greedy tokens are the same; running free, by "
        f"{found.free_error:.1e} and {found.free_equal}"
    )


class Writer(Protocol):
    """Writes a job's model in a format, and prints what it wrote."""

    def __call__(self, job: Job, *, as_json: bool) -> None:
        """Do both."""


WRITERS: dict[str, Writer] = dict.fromkeys(FORMATS, _checkpoint)
