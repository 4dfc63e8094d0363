"""``octavo import``: check an FP8 folder, and write the same codes in another format."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.checkpoints import QuantizedModel, load_quantized, read_configuration
from octavo.checksums import SUMS, count_listed
from octavo.cli import options
from octavo.cli.console import number, print_json, print_lines, print_table
from octavo.cli.export import export
from octavo.errors import ConfigError
from octavo.models.sources import check_run_folder

__all__ = ["import_"]

DEFAULT = "octavo"


def import_(
    *,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with config.json and safetensors in FP8.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Also write the model there, with unchanged codes and scales."),
    ] = None,
    format_: Annotated[str | None, typer.Option("--format", help="Format of --out. [default: octavo]")] = None,
    as_json: options.Json = False,
) -> None:
    """Read a model in FP8 from another tool, check every tensor, and print its recipes."""
    check_run_folder(folder)
    if out is not None:
        read_configuration(folder)  # raises for a folder that is not in FP8, which octavo export would quantize
        export(model=str(folder), out=out, format_=format_ or DEFAULT, as_json=as_json)
        return
    if format_ is not None:
        raise ConfigError("--format is the format of --out; give --out FOLDER too, or leave --format out")
    imported, counts = load_quantized(folder), count_listed(folder)
    if as_json:
        listed, files = counts or (0, None)
        print_json(_record(imported) | {"checksums": counts is not None, "files_checked": listed, "files": files})
    else:
        _print(folder, imported, checked=counts)


def _record(imported: QuantizedModel) -> dict[str, Any]:
    return {
        "format": imported.format,
        "context": imported.context,
        "layers": {path: recipe.name for path, recipe in imported.recipes.items()},
        "from_fnuz": dict(imported.from_fnuz),
        "kv_scales": {layer: [float(scale) for scale in pair] for layer, pair in imported.kv_scales.items()},
    }


def _fnuz_lines(imported: QuantizedModel) -> list[str]:
    if not imported.from_fnuz:
        return []
    rounded = {path: count for path, count in imported.from_fnuz.items() if count}
    lines = [f"{len(imported.from_fnuz)} layers are FNUZ codes, read as OCP codes with half the scale"]
    return lines + [
        f"{number(count)} weights of {path} are not in E4M3 and were rounded" for path, count in rounded.items()
    ]


def _print(folder: Path, imported: QuantizedModel, *, checked: tuple[int, int] | None) -> None:
    layers = Counter(recipe.name for recipe in imported.recipes.values())
    rows = [(name, number(count)) for name, count in layers.items()]
    print_table(f"{folder}, {imported.format}", ["recipe", "layers"], rows)
    lines = [f"keys and values have scales in {len(imported.kv_scales)} layers"] if imported.kv_scales else []
    lines += _fnuz_lines(imported)
    print_lines(
        *lines,
        "every tensor is recognized, every scale positive and finite; octavo eval and octavo generate take the folder",
        f"{checked[0]} of {checked[1]} files match their checksums ({SUMS})"
        if checked
        else f"the folder has no checksums ({SUMS}), so corrupted codes cannot be detected",
    )
