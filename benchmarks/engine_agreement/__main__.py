"""Agreement of engines on SmolLM2-135M-Instruct.

    python -m benchmarks.engine_agreement [--parts folders,matrix,why,faults,trials,served] [--windows 40]
        [--known FILE] [--no-write]

Hours on two cores; steps are saved in build/engine_agreement, and a run that was stopped goes on. ``--known`` is a file
of finished steps: read if it exists, and written with all at the end.

folders   one compressed-tensors folder, dynamic and static, in octavo and in transformers: perplexity on the windows of
          ``octavo eval``, each difference between the two changed alone, and octavo with other last bits
matrix    KL and mean |Δ log p| of every pair of profiles, of UE8M0 and float scales against BF16, and floors
why       attribution of the five pairs that differ most
faults    the profiles one property away from vllm-block: which can be told from each other on 128 tokens
trials    faulty servers, five for each of four profiles: whether ``--server-logprobs`` names the property
served    runs of ``octavo train --as-served-by``: the trainer's log-probabilities of 10,000 tokens, the engine's and
          those of ``octavo serve --as``; and of 254 tokens with all linear layers by the engines' own code,
          which scripts/engine_sources.py unpacks

``--parts first-layer`` has a result of its own: trials of servers with other kernels, of the first decoder layer alone.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks import smollm2
from benchmarks.engine_agreement.first_layer import COLUMNS as FIRST_LAYER_COLUMNS
from benchmarks.engine_agreement.first_layer import NORMS, first_layer_rows
from benchmarks.engine_agreement.folders import COLUMNS as FOLDER_COLUMNS
from benchmarks.engine_agreement.folders import KINDS, cast_properties, compare_readers, folder_table
from benchmarks.engine_agreement.heat_map import heat_map
from benchmarks.engine_agreement.matrix import (
    LENGTH,
    NAMES,
    attributions,
    fault_groups,
    floor_rows,
    largest_pairs,
    matrix_rows,
    pair_matrices,
    scale_rows,
)
from benchmarks.engine_agreement.saved_steps import read_known, write_known
from benchmarks.engine_agreement.served import COLUMNS, OWN_COLUMNS, served_tables
from benchmarks.engine_agreement.trials import COLUMNS as TRIAL_COLUMNS
from benchmarks.engine_agreement.trials import trial_rows
from benchmarks.measure import hardware, markdown_table, publish
from octavo.engines.summary import EFFECT_COLUMNS
from octavo.files import write_atomically
from octavo.quantization.comparison.evaluation_text import evaluation_windows

PICTURE = Path(__file__).parents[2] / "docs/images/engines.svg"
PARTS = ("folders", "matrix", "why", "faults", "trials", "served")
OF_PAIRS = {"matrix", "why", "faults", "trials"}
PAIR_WINDOWS, PAIRS = 10, 5
FIRST_LAYER = (32, 64)  # windows, tokens


def folders(count: int) -> Iterator[str]:
    """Lines of the first part."""
    for kind in KINDS:
        yield f"## A {kind} folder in two readers, {count} windows of 512 tokens"
        yield ""
        yield from markdown_table(FOLDER_COLUMNS, folder_table(compare_readers(kind, count)))
        yield from (
            "",
            "Each property of the casts that differs, from octavo's value to compressed-tensors', one window:",
            "",
        )
        yield from markdown_table(EFFECT_COLUMNS, cast_properties(kind))
        yield ""


def pairs(parts: list[str], *, draw: bool) -> Iterator[str]:
    """Lines of the parts that run profiles; the matrix is drawn for the documents too."""
    model = smollm2.load()
    windows = evaluation_windows(model, "language-topics", "all", count=PAIR_WINDOWS, length=LENGTH)
    if "matrix" in parts or "why" in parts:
        found = pair_matrices(model, windows)
        kl = found["kl"].mean(0)
        if draw:
            write_atomically(PICTURE, heat_map(NAMES, kl.numpy()))
        yield f"## Pairs of profiles, {PAIR_WINDOWS} windows of {LENGTH} tokens"
        for title, what in (("KL(row ‖ column), nats a token", "kl"), ("Mean |Δ log p| of the text, nats", "delta")):
            yield from ("", f"### {title}", "", *markdown_table(["", *NAMES], matrix_rows(found[what].mean(0))))
        yield from ("", "### Float scales and UE8M0 against BF16", "")
        columns = ["float", "UE8M0", "KL(float ‖ BF16)", "KL(UE8M0 ‖ BF16)", "difference"]
        yield from markdown_table(columns, scale_rows(found["kl"]))
        yield from ("", "### Floor: a profile with other last bits in its embeddings against itself", "")
        yield from markdown_table(["profile", "KL"], floor_rows(model, windows))
        if "why" in parts:
            yield from (
                "",
                f"## Why: the {PAIRS} pairs of distinct profiles with the largest KL, {PAIR_WINDOWS} windows",
                "",
            )
            rows = attributions(model, largest_pairs(kl, PAIRS), windows)
            columns = ["trainer, server", "property", "layers", "KL alone", "KL left; of a total, interactions"]
            yield from markdown_table(columns, rows)
    if "faults" in parts:
        groups = fault_groups(model, "vllm-block", windows[0, :128])
        yield from ("", "## Changes of one property of vllm-block, by the numbers they give on 128 tokens", "")
        yield from (f"- {'; '.join(group)}" for group in groups)
    if "trials" in parts:
        rows = list(trial_rows(model, windows[0, :128]))
        alone, near = (sum(row[column] == "yes" for row in rows) for column in (2, 5))
        shared = sum(row[2] == "no" and row[1] in row[3] for row in rows)  # with a property that gives equal numbers
        named = f"{alone} named by 128 tokens, {shared} beside a property of equal numbers"
        heading = f"## Faulty servers: of {len(rows)}, {named}; {near} with other last bits"
        yield from ("", heading, "")
        yield from markdown_table(TRIAL_COLUMNS, rows)


def first_layer() -> Iterator[str]:
    """Lines of the trials of a server's first layer."""
    model, (count, length) = smollm2.load(), FIRST_LAYER
    windows = evaluation_windows(model, "language-topics", "all", count=count, length=length)
    rows = list(first_layer_rows(model, windows))
    yield f"## Faulty servers of the first layer alone, with other kernels, on {count} windows of {length} tokens"
    yield ""
    for norms in NORMS:
        own = [row for row in rows if row[2] == norms]
        named, kept = (sum(row[column] == "yes" for row in own) for column in (3, 5))
        yield f"- norms round {norms}: of {len(own)}, {named} named alone; the fault is possible in {kept}"
    yield ""
    yield from markdown_table(FIRST_LAYER_COLUMNS, rows)


def lines_of(parts: list[str], windows: int, *, draw: bool) -> Iterator[str]:
    """Lines of the result."""
    if "folders" in parts:
        yield from folders(windows)
    if "first-layer" in parts:
        yield from first_layer()
    if OF_PAIRS & {*parts}:
        yield from pairs(parts, draw=draw)
    if "served" in parts:
        served, own = served_tables()
        yield from ("", "## Runs trained as an engine serves", "", *markdown_table(COLUMNS, served))
        yield from ("", "### All their linear layers by the engines' own code", "", *markdown_table(OWN_COLUMNS, own))


def main() -> None:
    """Run the parts, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    parts, machine, known = arguments.parts.split(","), hardware(), arguments.known
    os.nice(10)
    if known is not None and known.exists():
        read_known(known)
    try:
        lines = list(lines_of(parts, arguments.windows, draw=not arguments.no_write))
    finally:
        if known is not None:
            write_known(known)
    publish(
        "engine_agreement", lines, title="Agreement of engines", machine=machine, write=not arguments.no_write,
        variant="" if {*parts} == {*PARTS} else "_".join(parts),
    )  # fmt: skip


if __name__ == "__main__":
    main()
