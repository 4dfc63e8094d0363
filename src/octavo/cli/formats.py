"""``octavo formats``: the format table, and corrections of the source article's figures."""

from typing import Annotated, Any

import typer

from octavo.cli.console import number, print_json, print_table
from octavo.cli.errata import Erratum, errata
from octavo.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, Format

__all__ = ["formats"]

EVERYDAY = (FP32, BF16, FP16, E4M3, E5M2)
LAYOUT = ("sign_bits", "exponent_bits", "mantissa_bits")


def formats(
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Include the FNUZ variants and E8M0, the scale of MX blocks.")
    ] = False,
    show_errata: Annotated[
        bool,
        typer.Option("--errata", help="Print wrong figures of the article octavo started from, with the correct ones."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the number formats: range, precision and counts, all computed from the bit layouts."""
    if show_errata:
        _show_errata(errata(), as_json=as_json)
    else:
        _show_formats(FORMATS if everything else EVERYDAY, as_json=as_json)


def _show_formats(rows: tuple[Format, ...], *, as_json: bool) -> None:
    records = [_record(row) for row in rows]
    if as_json:
        print_json({"formats": records})
        return
    columns = [name.replace("_", " ") for name in records[0] if name not in LAYOUT]
    columns.insert(2, "layout")
    print_table("Number formats (layout: sign-exponent-mantissa bits)", columns, [_cells(record) for record in records])


def _record(row: Format) -> dict[str, Any]:
    return {
        "name": row.name,
        "bits": row.bits,
        "sign_bits": row.sign_bits,
        "exponent_bits": row.exponent_bits,
        "mantissa_bits": row.mantissa_bits,
        "bias": row.bias,
        "max": row.max,
        "min_normal": row.min_normal,
        "min_subnormal": row.min_subnormal,
        "epsilon": row.epsilon,
        "binades": row.binades,
        "distinct_values": row.distinct_finite_values,
    }


def _cells(record: dict[str, Any]) -> list[str]:
    cells = [
        value if isinstance(value, str) else number(value, 5) for key, value in record.items() if key not in LAYOUT
    ]
    cells.insert(2, "-".join(str(record[key]) for key in LAYOUT))
    return cells


def _show_errata(rows: tuple[Erratum, ...], *, as_json: bool) -> None:
    if as_json:
        print_json({"errata": [{"article": row.article, "true": row.true} for row in rows]})
        return
    print_table("Errata", ["the article says", "true (computed)"], [[row.article, row.true] for row in rows], left=2)
