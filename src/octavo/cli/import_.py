"""``octavo import``: what a folder in FP8 holds, and the same codes in another format."""

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.checksums import SUMS, count_listed
from octavo.cli import options
from octavo.cli.console import number, print_json, print_table, stdout
from octavo.cli.export import export
from octavo.errors import ConfigError
from octavo.interchange import QuantizedModel, load_quantized, read_configuration
from octavo.models.sources import check_is_run

__all__ = ["import_"]

DEFAULT = "octavo"


def import_(
    *,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With config.json and safetensors in FP8.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Write it there too, its codes and scales untouched.")
    ] = None,
    format_: Annotated[str | None, typer.Option("--format", help="Of what --out writes. [default: octavo]")] = None,
    as_json: options.Json = False,
) -> None:
    """Read a model in FP8 from another tool, check every tensor of it, and say what it is."""
    check_is_run(folder)
    if out is not None:
        read_configuration(folder)  # what is not in FP8 is octavo export's to quantize, not taken for it here
        export(model=str(folder), out=out, format_=format_ or DEFAULT, as_json=as_json)
        return
    if format_ is not None:
        raise ConfigError("--format says what --out writes; give --out FOLDER too, or leave --format out")
    read, counts = load_quantized(folder), count_listed(folder)
    if as_json:
        listed, files = counts or (0, None)
        print_json(_record(read) | {"checksums": counts is not None, "files_checked": listed, "files": files})
    else:
        _print(folder, read, checked=counts)


def _record(read: QuantizedModel) -> dict[str, Any]:
    return {
        "format": read.format,
        "context": read.context,
        "layers": {path: recipe.name for path, recipe in read.recipes.items()},
        "kv_scales": {layer: [float(scale) for scale in pair] for layer, pair in read.kv_scales.items()},
    }


def _print(folder: Path, read: QuantizedModel, *, checked: tuple[int, int] | None) -> None:
    counts: dict[str, int] = {}
    for recipe in read.recipes.values():
        counts[recipe.name] = counts.get(recipe.name, 0) + 1
    print_table(f"{folder}, {read.format}", ["recipe", "layers"], [(name, number(n)) for name, n in counts.items()])
    lines = [f"keys and values have scales in {len(read.kv_scales)} layers"] if read.kv_scales else []
    lines.append(
        "every tensor is known, every scale positive and finite; octavo eval and octavo generate take the folder"
    )
    lines.append(
        f"{checked[0]} of {checked[1]} files are the ones that were written ({SUMS})"
        if checked
        else f"the folder has no checksums ({SUMS}), so a bit that was flipped in codes cannot be seen"
    )
    stdout().print("\n".join(lines), markup=False, soft_wrap=True)
