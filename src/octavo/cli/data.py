"""``octavo data``: documents and bytes of a text source, by split."""

from typing import Annotated, Any

import typer

from octavo.cli import options
from octavo.cli.console import print_json, print_table, stdout
from octavo.text.corpus import Split, content_hash, corpus_summary
from octavo.text.source_settings import with_column
from octavo.text.sources import BUILTIN, divide, load_documents

__all__ = ["data"]


def data(
    *,
    source: Annotated[str, typer.Option("--data", help=options.DATA_HELP)] = BUILTIN,
    text_column: options.TextColumn = None,
    hub: options.DataHub = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a source's documents and bytes, by split and kind."""
    del hub  # its option opens the Hub
    source = source if text_column is None else with_column(source, text_column)
    summary = _builtin() if source == BUILTIN else _other(source)
    if as_json:
        print_json(summary)
        return
    rows = [(row["split"], row["kind"], f"{row['documents']:,}", f"{row['bytes']:,}") for row in summary["splits"]]
    total = [sum(row[key] for row in summary["splits"]) for key in ("documents", "bytes")]
    rows.append(("all", "", f"{total[0]:,}", f"{total[1]:,}"))
    print_table(f"Data: {source}", ["split", "kind", "documents", "bytes"], rows, left=2)
    for name in ("licence", "python", "content_hash"):
        if name in summary:
            stdout().print(f"{name.replace('_', ' ')}: {summary[name]}", markup=False)


def _builtin() -> dict[str, Any]:
    summary = corpus_summary()
    splits = [
        {"split": split, "kind": kind, "documents": count, "bytes": summary.bytes[split, kind]}
        for (split, kind), count in sorted(summary.documents.items())
    ]
    return {
        "source": BUILTIN,
        "licence": summary.licence,
        "python": summary.python,
        "content_hash": summary.content_hash,
        "splits": splits,
    }


def _other(source: str) -> dict[str, Any]:
    documents = load_documents(source)
    divided = divide(documents, by_file=False)
    splits = [
        {
            "split": str(split),
            "kind": "text",
            "documents": len(divided[split]),
            "bytes": sum(len(document.text.encode()) for document in divided[split]),
        }
        for split in Split
    ]
    return {"source": source, "content_hash": content_hash(documents), "splits": splits}
